"""A user's directory outside the repository: the package of docs/extending.md, data, a model, and `rljob run` in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file

from e2e.docs.blocks import blocks
from rljob.ledger.audit import audit
from rljob.ledger.reader import LedgerReader
from rljob.ledger.sample_detail import SampleDetail, show

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Run:
    """A run of `rljob run` that has ended."""

    directory: Path
    code: int
    output: str

    def check(self) -> Run:
        """Assert that the run succeeded with a clean audit; return the run."""
        assert self.code == 0, self.output + self.logs()
        report = audit(self.directory)
        assert report.ok and report.finished, [problem for check in report.checks for problem in check.problems]
        return self

    def logs(self) -> str:
        """Return the last 3000 characters of the log of each component."""
        return "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in self.directory.glob("logs/*.log"))

    def rows(self, query: str) -> list[Any]:
        """Return rows of the run's ledger."""
        with LedgerReader(self.directory) as ledger:
            return ledger.rows(query)

    def batch(self, step: int) -> list[SampleDetail]:
        """Return the samples of a batch, in its order."""
        with LedgerReader(self.directory) as ledger:
            [(names,)] = ledger.rows("SELECT samples FROM batches WHERE step = ?", step)
            return [show(ledger, name) for name in json.loads(names)]

    def table(self, step: int) -> NDArray[np.float32]:
        """Return the weights of the table model in a checkpoint."""
        return load_file(self.directory / f"checkpoints/step-{step:06d}/model.safetensors")["table"]


class Workspace:
    """A user's working directory: ``place`` is the current directory of every command and holds the user's packages."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for block in blocks(PAGE):
            if block.file is not None:
                self.write(block.file, block.text)
        shutil.copytree(TEMPLATES, place, dirs_exist_ok=True)
        self.python("-m", "mypackage.model", "model")

    def write(self, name: str, text: str) -> None:
        """Write a file of the user."""
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python as the user, without the repository's tests on its path; return the completed process."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )

    def run(self, name: str, added: Mapping[str, Any] = MappingProxyType({}), **fields: dict[str, Any]) -> Run:
        """Run a job called ``name``; ``fields`` as for :func:`manifest`. ``added``: section → one more entry."""
        page = yaml.safe_load((self.place / "job.yaml").read_text())
        written = manifest(page, name, fields)
        for section, entry in added.items():
            written["spec"][section].append(entry)
        self.write(f"{name}.yaml", yaml.safe_dump(written))
        return self.run_manifest(f"{name}.yaml", name)

    def run_manifest(self, file: str, name: str) -> Run:
        """Run the job in ``file``, which is called ``name``."""
        directory = self.place / "runs" / name
        done = self.python("-m", "rljob.cli.main", "run", file, "--run-dir", str(directory), "--no-screen")
        return Run(directory, done.returncode, done.stdout)


def manifest(page: dict[str, Any], name: str, fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the page's manifest with built-in implementations except engine and backend, changed by ``fields``.

    ``fields``: section → fields; in a section that is a list they change its only entry. The model is made once for all
    jobs, so the initializer is removed.
    """
    spec = {**page["spec"], "algorithm": {"preset": "grpo"}, "models": [{"name": "policy", "source": "model"}]}
    del spec["initializer"]
    [task] = spec["tasks"]
    spec["tasks"] = [{**task, "loop": "single_turn", "groupFilter": {}}]
    spec["rewards"] = [{"name": task["reward"], "builtin": "exact_match"}]
    for section, changed in fields.items():
        old = spec.get(section, {})
        spec[section] = [{**old[0], **changed}] if isinstance(old, list) else {**old, **changed}
    return {**page, "metadata": {"name": name}, "spec": spec}
