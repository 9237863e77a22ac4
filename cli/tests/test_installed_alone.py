"""`pip install ./core ./cli` is enough for the command line: no other distribution, no undeclared import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = ("core", "cli")
PINNED_BY = {"pydantic_core": "pydantic"}
"""Imported module → the declared distribution that pins it."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of core and cli, installed into a directory of their own."""
    target = tmp_path_factory.mktemp("installed")
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--offline", "--no-deps"]
    command += ["--no-build-isolation", "--python", sys.executable, "--target", str(target)]
    subprocess.run([*command, *(str(ROOT / each) for each in ALONE)], check=True)
    return target


def imports(distribution: str) -> set[str]:
    """Return the absolute modules that a distribution's sources import."""
    found: set[str] = set()
    for path in (ROOT / distribution / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "rljob":
                found |= {f"rljob.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_command_line_starts_with_core_and_cli_alone(installed: Path) -> None:
    third_party = sysconfig.get_path("purelib")  # without site (-S) its .pth files, the editable installs, do nothing
    environment = {"PYTHONPATH": f"{installed}:{third_party}"}
    program = "import rljob.cli.main as main; main.main()"
    for arguments in (["--help"], ["--version"], ["explain", "--field", "spec.seed"]):
        command = [sys.executable, "-S", "-c", program, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=installed)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout


def test_every_package_of_rljob_that_is_imported_is_in_core_or_cli() -> None:
    for distribution, known in (("core", ("core",)), ("cli", ALONE)):
        packages = {path.name for each in known for path in (ROOT / each / "src/rljob").iterdir()}
        missing = {name for name in imports(distribution) if name.startswith("rljob.")}
        missing = {name for name in missing if name.split(".")[1] not in packages}
        assert missing == set(), distribution


@pytest.mark.parametrize("distribution", ALONE)
def test_every_third_party_import_is_declared(distribution: str) -> None:
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    dependencies = [*project["dependencies"], *(name for extra in extras for name in extra)]
    declared = {normalized(re.split(r"[^\w.-]", dependency)[0]) for dependency in dependencies}
    roots = {name.partition(".")[0] for name in imports(distribution)} - sys.stdlib_module_names - {"rljob"}
    providers = packages_distributions()
    undeclared = {
        root
        for root in roots
        if not {normalized(name) for name in providers.get(PINNED_BY.get(root, root), [root])} & declared
    }
    assert undeclared == set()
