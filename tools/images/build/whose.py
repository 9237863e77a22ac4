"""Fails when two installed packages disagree about a file: the one installed last would have broken the other.

uv takes such packages without a word: cuda-python 12.6 brings files of cuda-bindings 13. Usage: whose.py SITE_PACKAGES.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def disputes(site: Path) -> list[str]:
    """Return one sentence for each set of packages that have a file of the same name and other contents.

    Files outside of Python packages, as build_backend.py that some wheels hold by mistake, are nobody's to import.
    """
    owners: dict[str, dict[str, str]] = {}  # file → digest → package
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(newline="") as rows:
            for path, digest, _ in csv.reader(rows):
                if digest and "/" in path and ".dist-info/" not in path:
                    owners.setdefault(path, {}).setdefault(digest, record.parent.name.removesuffix(".dist-info"))
    found = {" and ".join(sorted(each.values())): path for path, each in sorted(owners.items()) if len(each) > 1}
    return [f"{packages} both have {path}: choose versions of which one does" for packages, path in found.items()]


if __name__ == "__main__":
    sys.exit("\n".join(disputes(Path(sys.argv[1]))) or 0)
