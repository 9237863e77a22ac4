"""Writes the generated files of the repository, or checks that they are up to date.

`python -m tools.generate crds` writes the CustomResourceDefinitions and their chart (`make crds`), `dashboards` the
Grafana dashboards of the chart rljob (`make dashboards`). With --check it writes nothing and names, for each outdated
file, the command to run (`make verify`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rljob.api.crd import GROUP, definitions, to_yaml
from rljob.api.explain import manifest_page
from rljob.cli.reference import page as command_page
from tools.dashboards import FOLDER, dashboards

ROOT = Path(__file__).parents[1]
CRD_FOLDERS = ("crds", "charts/rljob-crds/files")
FOLDERS = (*CRD_FOLDERS, FOLDER)
"""Every file of these folders is generated."""


def crds() -> dict[str, str]:
    """Return path in the repository → content of the definitions: for readers, and as files of the chart."""
    files = {f"{GROUP}_{name}.yaml": to_yaml(definition) for name, definition in definitions().items()}
    return {f"{folder}/{name}": content for folder in CRD_FOLDERS for name, content in files.items()}


COMMANDS: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "make crds": crds,
    "make dashboards": dashboards,
    "make docs": lambda: {"docs/manifest.md": manifest_page(), "docs/cli.md": command_page()},
}
"""Command → function that returns the files it writes: path → content."""


def problems(root: Path = ROOT) -> list[str]:
    """Return one message for every generated file that is outdated."""
    found, generated = [], set()
    for command, contents in COMMANDS.items():
        for path, content in contents().items():
            generated.add(root / path)
            if not (root / path).is_file():
                found.append(f"{path}: missing; run {command}")
            elif (root / path).read_text() != content:
                found.append(f"{path}: out of date; run {command}")
    candidates = (path for folder in FOLDERS for path in sorted((root / folder).glob("*")))
    return found + [
        f"{path.relative_to(root)}: nothing generates it; remove it" for path in candidates if path not in generated
    ]


def main() -> None:
    """Write the files of a command; with --check print the outdated files and exit with code 1."""
    (argument,) = sys.argv[1:]
    if argument == "--check":
        if found := problems():
            sys.exit("\n".join(found))
        return
    for path, content in COMMANDS[f"make {argument}"]().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(content)


if __name__ == "__main__":
    main()
