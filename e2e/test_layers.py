"""Light components import no torch, no engine and no controller framework. Module and class names are unique."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "kopf", "ray", "transformers")
LIGHT = (
    "rljob.api.models",
    "rljob.protocol.coordinator_link",
    "rljob.manifests.render",
    "rljob.scheduling.scheduler",
    "rljob.ledger.writer",
    "rljob.ledger.audit",
    "rljob.ledger.query_worker",
    "rljob.operator.reconcile",
    "rljob.coordinator.serve",
    "rljob.runner.app",
    "rljob.simulation.simulated_run",
    "rljob.cli.typer_app",
)

SOURCES = sorted(Path(__file__).parents[1].glob("*/src/rljob/**/*.py"))
CONVENTIONAL = {"__init__", "__main__", "base", "errors", "main", "metrics", "preflight"}
"""Names of modules with the same meaning in every package."""


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_command_line_imports_only_core_and_itself() -> None:
    shared = ("api", "protocol", "manifests", "scheduling", "ledger", "kube", "cli", "local", "remote")
    program = (
        "import sys, rljob.cli.typer_app; print(*{name.split('.')[1] for name in sys.modules if name[:6] == 'rljob.'})"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) <= set(shared)


def test_only_the_entry_points_of_the_operator_import_kopf() -> None:
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {path.stem for name in names if name.split(".")[0] == "kopf"}
    assert found == {"handlers", "main"}


def test_module_names_are_unique() -> None:
    names = Counter(path.stem for path in SOURCES if path.stem not in CONVENTIONAL)
    assert [name for name, count in names.items() if count > 1] == []


def test_public_class_names_are_unique() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    classes = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1 and not name.startswith("_")] == []
