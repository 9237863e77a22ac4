"""Packages with different contents of the same file break each other, and the installer does not report it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WHOSE = Path(__file__).parents[1] / "build/whose.py"


def install(site: Path, package: str, **files: str) -> None:
    """Write the record of an installed package: file → digest; two underscores stand for a slash."""
    info = site / f"{package}.dist-info"
    info.mkdir()
    rows = [f"{name.replace('__', '/')}.py,{digest},1\n" for name, digest in files.items()]
    (info / "RECORD").write_text("".join([*rows, f"{package}.dist-info/RECORD,,\n"]))


def whose(site: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(WHOSE), str(site)], capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


def test_two_packages_with_the_same_content_of_a_file_are_accepted(tmp_path: Path) -> None:
    install(tmp_path, "one-1", shared__a="sha256=x", one__b="sha256=y", build_backend="sha256=1")
    install(tmp_path, "two-2", shared__a="sha256=x", two__b="sha256=z", build_backend="sha256=2")
    assert whose(tmp_path) == (0, "")


def test_two_packages_with_different_contents_of_a_file_fail_the_build(tmp_path: Path) -> None:
    install(tmp_path, "one-1", shared__a="sha256=x")
    install(tmp_path, "two-2", shared__a="sha256=y")
    assert whose(tmp_path) == (1, "one-1 and two-2 both have shared/a.py: choose versions of which one does")
