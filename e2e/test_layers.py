"""Light components stay light: no torch, no engine, no controller framework."""

from __future__ import annotations

import subprocess
import sys

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
    "rljob.coordinator.service",
    "rljob.runner.app",
    "rljob.cli.app",
)


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_part_imports_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_command_line_imports_core_alone() -> None:
    shared = ("api", "protocol", "manifests", "scheduling", "ledger", "kube", "cli", "local", "remote")
    program = "import sys, rljob.cli.app; print(*{name.split('.')[1] for name in sys.modules if name[:6] == 'rljob.'})"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) <= set(shared)
