"""The real helm, and the chart of the operator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from tools.cluster import build

CHART = Path(__file__).parents[2] / "charts" / "rljob"
KUBERNETES = "1.36.0"


class Helm:
    """The real helm."""

    def __init__(self, home: Path, kubeconfig: Path | None = None) -> None:
        self._program = str(build.ensure("helm") / "helm")
        self._environment = dict(os.environ) | {"HOME": str(home), "KUBECONFIG": str(kubeconfig or "/dev/null")}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run helm and return its output."""
        done = subprocess.run(
            [self._program, *arguments], env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def template(self, *values: str) -> list[dict]:
        """Return the objects that the chart renders."""
        text = self("template", "rljob", str(CHART), "-n", "rljob-system", "--kube-version", KUBERNETES, *values)
        return [found for found in yaml.safe_load_all(text) if found]


def of_kind(found: list[dict], kind: str) -> dict:
    """Return the first object of a kind."""
    return next(o for o in found if o["kind"] == kind)
