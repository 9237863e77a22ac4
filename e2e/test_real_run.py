"""`rljob run` without fakes: vLLM, FSDP trainer, coordinator, runner, reward service, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from e2e.sums_task import SUMS
from rljob.api.tasks import Task
from rljob.ledger.audit import audit
from rljob.trainer.example_model import Recipe, build

ENDS = {"trained", "filtered", "surplus", "expired", "failed"}
STEPS = 15
THOROUGH = bool(os.environ.get("RLJOB_THOROUGH"))
STALENESS = [0, 1] if THOROUGH else [1]  # python -m e2e.soak has 0, 1 and 2
VICTIMS = ["runner", "reward-sums", "server", "trainer", "rollout-main-0", "coordinator"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers some problems correctly, so that rewards differ and weights change."""
    directory = tmp_path_factory.mktemp("policy") / "model"
    build(directory, Task.model_validate(SUMS), seed=1, recipe=Recipe(working_steps=200, bare_steps=20))
    return directory


def write_manifest(path: Path, model: Path, **training: Any) -> Path:
    spec = {
        "seed": 7,
        "models": [{"name": "policy", "source": str(model)}],
        "training": {"steps": STEPS, "promptsPerStep": 8, "samplesPerPrompt": 8, "maxStaleness": 1, **training},
        "tasks": [SUMS],
        "evaluation": {"problems": 32},
        "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
        "trainer": {"optimizer": {"learningRate": 3e-4}},
        "rollouts": [{"name": "main", "maxModelLength": 128, "maxConcurrency": 32, "args": ["--block-size", "32"]}],
        "checkpoints": {"everySteps": 5, "keep": 2},
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "real"}, "spec": spec}
    path.write_text(yaml.safe_dump(manifest))
    return path


class Running:
    """A started `rljob run`."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process, self.directory = process, directory

    def step(self) -> int:
        """Return the number of applied batches; -1 while the coordinator does not answer."""
        try:
            port = json.loads((self.directory / "ports.json").read_bytes())["coordinator"]
            with urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=2) as response:
                return json.load(response)["progress"]["step"]
        except (OSError, ValueError, KeyError):
            return -1

    def wait(self, reached: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait until a condition holds while the run is running."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)  # another process: there is nothing to await

    def pid(self, component: str) -> int:
        """Return the process of a component; ``server`` is the vLLM server that the agent started."""
        if component == "server":
            return self.server("rollout-main-0")
        events = [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]
        return [event["pid"] for event in events if event["subject"] == component and event["event"] == "started"][-1]

    def server(self, component: str) -> int:
        """Return the server that a component's process started; -1 if there is none."""
        agent = self.pid(component)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rpartition(")")[2].split()[1]) == agent:
                    return int(stat.parent.name)
            except OSError:
                continue
        return -1

    def living(self, component: str) -> int:
        """Wait for a process of a component and return its pid. Never -1: os.kill(-1) would kill all processes."""
        found = -1

        def there() -> bool:
            nonlocal found
            found = self.pid(component)
            return found > 0

        self.wait(there)
        return found

    def output(self) -> str:
        return self.directory.with_suffix(".out").read_text()[-3000:]


@contextlib.contextmanager
def rljob_run(manifest: Path, directory: Path) -> Iterator[Running]:
    with directory.with_suffix(".out").open("wb") as out:
        command = [
            sys.executable,
            "-m",
            "rljob.cli.main",
            "run",
            str(manifest),
            "--run-dir",
            str(directory),
            "--no-screen",
        ]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Running(process, directory)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alpha", STALENESS)
def test_the_run_survives_a_kill_9_of_every_component(tmp_path: Path, model: Path, alpha: int) -> None:
    directory = tmp_path / "run"
    with rljob_run(write_manifest(tmp_path / "job.yaml", model, maxStaleness=alpha), directory) as run:
        for number, victim in enumerate(VICTIMS, start=1):
            run.wait(lambda number=number: run.step() >= 2 * number)  # type: ignore[misc]
            pid = run.living(victim)
            os.kill(pid, signal.SIGKILL)
            run.wait(lambda victim=victim, pid=pid: run.pid(victim) not in (pid, -1))  # type: ignore[misc]
        assert run.process.wait(300) == 0, run.output()
    check_ledger(directory, alpha)
    check_metrics(directory)
    assert (directory / f"checkpoints/step-{STEPS:06d}/model.safetensors").is_file()
    assert (directory / "reward.png").is_file()


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(not THOROUGH, reason="two minutes; python -m e2e.soak has these faults too: make thorough")
def test_a_run_suspended_and_then_killed_completely_resumes_with_a_clean_audit(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "run"
    manifest = write_manifest(tmp_path / "job.yaml", model, steps=8, maxStaleness=1)
    with rljob_run(manifest, directory) as run:
        run.wait(lambda: run.step() >= 2)
        run.process.terminate()
        assert run.process.wait(120) == 130, run.output()
    suspended = json.loads((directory / "status.json").read_bytes())
    assert suspended["state"] == "Suspended"
    assert suspended["lastCheckpoint"]["step"] == suspended["progress"]["step"] >= 2
    with rljob_run(manifest, directory) as run:
        run.wait(lambda: run.step() >= suspended["progress"]["step"] + 2)
        victims = [run.process.pid, *(run.living(component) for component in VICTIMS)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):  # some processes end with the first one
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
    with rljob_run(manifest, directory) as run:
        assert run.process.wait(300) == 0, run.output()
    report = audit(directory)
    assert report.ok and report.finished, [problem for check in report.checks for problem in check.problems]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(8))
    assert [line["version"] for line in lines if line["kind"] == "evaluation"] == [0, 8]


def check_ledger(directory: Path, alpha: int) -> None:
    """Assert that no prompt was lost, no sample trained twice or older than α, and every batch applied."""
    with sqlite3.connect(directory / "ledger.sqlite") as ledger:
        ledger.row_factory = sqlite3.Row
        samples = ledger.execute(
            "SELECT s.*, g.row FROM samples s JOIN groups g ON g.id = group_id WHERE kind = 'train'"
        )
        rows = samples.fetchall()
        batches = [json.loads(row[0]) for row in ledger.execute("SELECT samples FROM batches ORDER BY step")]
        applied = {row[0] for row in ledger.execute("SELECT step FROM applied")}
        incarnations = ledger.execute("SELECT COUNT(*) FROM incarnations").fetchone()[0]
    assert {row["state"] for row in rows} <= ENDS
    assert sorted({row["row"] for row in rows}) == list(range(len(rows) // 8)), "a prompt was skipped"
    batched = Counter(sample for batch in batches for sample in batch)
    assert set(batched.values()) == {1} and len(batches) == STEPS
    assert batched.keys() == {row["id"] for row in rows if row["state"] == "trained"}
    assert applied == set(range(STEPS))
    assert all(0 <= row["step"] - row["min_version"] <= alpha for row in rows if row["state"] == "trained")
    assert incarnations == 2, "the trainer was killed once"


def check_metrics(directory: Path) -> None:
    """Assert that engine and trainer agreed on every log-probability of the first step."""
    with sqlite3.connect(directory / "ledger.sqlite") as ledger:
        first = json.loads(ledger.execute("SELECT metrics FROM applied WHERE step = 0").fetchone()[0])
    assert first["first_step_logprob_error"] <= 1e-4
