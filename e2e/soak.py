"""The most important faults, injected into a real run: `rljob run`, vLLM, the FSDP trainer. Prints a table.

    python -m e2e.soak [--json] [--model DIRECTORY] [--timeout SECONDS] [NAME...]

All faults are injected into one run, one after the other. The run must apply another batch after each fault, finish
with exit code 0 and pass its audit. --json also writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import time_limit
from benchmarks.report import report, target
from e2e.faults import disk
from e2e.faults.proxy import Moment, Proxy, Trigger
from rljob.api.resolve import DEFAULT_PROMPT
from rljob.api.tasks import Task
from rljob.ledger.audit import audit
from rljob.protocol import messages as m
from rljob.trainer.example_model import Recipe, build

TIMEOUT_SECONDS = 5400.0
HANG_SECONDS = 5.0
FULL_SECONDS = 5.0
CASE_TIMEOUT_SECONDS = 180.0
DISK_BYTES = 256 << 20
STEPS_PER_CASE = 3
NAMESPACE = "RLJOB_SOAK_NAMESPACE"
COMPONENTS = {"agent": "rollout-main-0", "reward": "reward-sums"}  # victim → component, where the names differ

CASES = [
    ("kill", "server", "generation", Moment("agent", "Generate", "after")),
    ("kill", "agent", "generation", Moment("agent", "Completions", "after")),
    ("kill", "runner", "reward", Moment("reward", "Score", "before")),
    ("kill", "reward", "reward", Moment("reward", "Score", "before")),
    ("kill", "trainer", "training", Moment("trainer", "Pull", "after")),
    ("kill", "trainer", "checkpoint", Moment("trainer", "Checkpoint", "after")),
    ("kill", "coordinator", "batch", Moment("trainer", "Train", "before")),
    ("kill", "coordinator", "update", Moment("trainer", "WeightGroupReady", "after")),
    ("kill", "trainer", "update", Moment("trainer", "SendWeights", "after")),
    ("kill", "server", "update", Moment("agent", "PrepareWeights", "after")),
    ("kill", "agent", "update", Moment("agent", "WeightAck", "before")),
    ("hang", "server", "generation", Moment("agent", "Generate", "after")),
    ("hang", "agent", "update", Moment("agent", "PrepareWeights", "after")),
    ("hang", "trainer", "update", Moment("trainer", "SendWeights", "after")),
    ("hang", "coordinator", "training", Moment("trainer", "StepDone", "before")),
    ("hang", "runner", "generation", Moment("runner", "GenerateResult", "after")),
    ("hang", "reward", "reward", Moment("reward", "Score", "before")),
    ("cut", "agent", "update", Moment("agent", "PrepareWeights", "after")),
    ("cut", "trainer", "training", Moment("trainer", "Train", "after")),
    ("cut", "coordinator", "generation", Moment("agent", "Completions", "before")),
    ("full", "all", "checkpoint", Moment("trainer", "Checkpoint", "before")),
    ("full", "all", "generation", Moment("agent", "Completions", "before")),
]
"""(fault, victim, phase, moment). Faults as in e2e.faults.cases; ``server`` is the vLLM server."""

SUMS: dict[str, Any] = {
    "name": "sums",
    "data": {"reasoningGym": {"dataset": "chain_sum", "config": {"max_terms": 3, "max_digits": 1}}},
    "prompt": DEFAULT_PROMPT,
    "reward": "sums",
    "sampling": {"maxTokens": 32},
}


@dataclass
class Outcome:
    """The result of a case: ``seconds`` from the fault to the next applied batch; ``problem`` is empty on success."""

    case: str
    seconds: float
    problem: str


def name_of(fault: str, victim: str, phase: str, moment: Moment) -> str:
    """Return the name of the case."""
    return f"{fault}-{victim}-{phase}-{moment.when}-{moment.message}"


def write_manifest(path: Path, model: Path, steps: int) -> None:
    """Write the manifest of the run."""
    spec = {
        "seed": 7,
        "models": [{"name": "policy", "source": str(model)}],
        "training": {"steps": steps, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 1},
        "tasks": [SUMS],
        "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
        "trainer": {"optimizer": {"learningRate": 1e-4}},
        "rollouts": [{"name": "main", "maxModelLength": 128, "maxConcurrency": 32}],
        "checkpoints": {"everySteps": 3, "keep": 2},
        "weightSync": {"timeoutSeconds": 20},
        "failurePolicy": {"maxRestarts": 200, "hangSeconds": HANG_SECONDS},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "soak"}, "spec": spec}
    path.write_text(yaml.safe_dump(job))


class RunExitedError(Exception):
    """The run exited before all cases were done."""


class Soak:
    """One `rljob run` behind a proxy.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.applied = 0
        self._batch_applied = asyncio.Event()
        self.proxy = Proxy("http://127.0.0.1:1", {"sums": "http://127.0.0.1:1"}, self._on_message)

    async def run(self, manifest: Path, cases: list[tuple[str, str, str, Moment]]) -> list[Outcome]:
        """Start the run, run all cases, and wait for the run's exit; return the outcome of each."""
        outcomes = []
        async with self.proxy:
            with self.directory.with_suffix(".out").open("wb") as out:
                command = ["-m", "e2e.faults.through_proxy", self.proxy.url, "run", str(manifest)]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *command, "--run-dir", str(self.directory), "--no-screen", stdout=out, stderr=out
                )
            exited = asyncio.create_task(process.wait())
            try:
                await self._find_servers(exited)
                for case in cases:
                    outcomes.append(await self._run_case(*case, exited))
                    if exited.done():
                        break
                    sys.stderr.write(f"{outcomes[-1].case:50} {outcomes[-1].seconds:6.1f} s {outcomes[-1].problem}\n")
                async with asyncio.timeout(2 * CASE_TIMEOUT_SECONDS):
                    outcomes.append(Outcome("the run finishes", 0.0, "" if await exited == 0 else self._log_tail()))
            finally:
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                    process.send_signal(signal.SIGTERM)
                    await exited
        return outcomes

    async def _find_servers(self, exited: asyncio.Task[int]) -> None:
        file = self.directory / "ports.json"
        while not file.exists():
            assert not exited.done(), self._log_tail()
            await asyncio.sleep(0.1)  # another process writes it
        ports = json.loads(file.read_bytes())
        self.proxy.coordinator = f"http://127.0.0.1:{ports['coordinator']}"
        self.proxy.rewards = {"sums": f"http://127.0.0.1:{ports['reward-sums']}"}

    async def _run_case(
        self, fault: str, victim: str, phase: str, moment: Moment, exited: asyncio.Task[int]
    ) -> Outcome:
        name, began, problem = name_of(fault, victim, phase, moment), time.monotonic(), ""

        def inject() -> None:
            nonlocal began
            began = time.monotonic()
            self._faults(victim)[fault]()

        trigger = self.proxy.trigger = Trigger(moment, inject)
        try:
            async with asyncio.timeout(CASE_TIMEOUT_SECONDS):
                await self._wait_unless_exited(trigger.injected.wait(), exited)
                wanted = self.applied + 1
                while self.applied < wanted:
                    self._batch_applied.clear()
                    await self._wait_unless_exited(self._batch_applied.wait(), exited)
        except TimeoutError:
            problem = f"no batch was applied after the fault; {self._log_tail()}"
        except RunExitedError as error:
            problem = str(error)
        return Outcome(name, time.monotonic() - began, problem)

    async def _wait_unless_exited(self, awaitable: Any, exited: asyncio.Task[int]) -> None:
        waiting = asyncio.ensure_future(awaitable)
        await asyncio.wait({waiting, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise RunExitedError(f"the run exited with code {exited.result()}: {self._log_tail()}")

    def _on_message(self, component: str, message: Any) -> None:
        if isinstance(message, m.StepDone) and message.step >= self.applied:
            self.applied = message.step + 1
            self._batch_applied.set()

    def _faults(self, victim: str) -> dict[str, Callable[[], None]]:
        def fill() -> None:
            disk.fill(self.directory)
            asyncio.get_running_loop().call_later(FULL_SECONDS, disk.empty, self.directory)

        return {
            "kill": lambda: os.kill(self._pid(victim), signal.SIGKILL),
            "hang": lambda: os.kill(self._pid(victim), signal.SIGSTOP),
            "cut": lambda: self.proxy.cut(victim),
            "full": fill,
        }

    def _pid(self, victim: str) -> int:
        if victim == "server":
            agent = self._pid("agent")
            children = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _parent(stat) == agent]
            return children[0]
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        component = COMPONENTS.get(victim, victim)
        return [e["pid"] for e in map(json.loads, lines) if (e["subject"], e["event"]) == (component, "started")][-1]

    def _log_tail(self) -> str:
        return self.directory.with_suffix(".out").read_text()[-1500:]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # gone
        return -1


def check_ledger(directory: Path) -> Outcome:
    """Return the outcome of the audit."""
    found = audit(directory)
    problems = [problem for check in found.checks for problem in check.problems]
    return Outcome(
        "the ledger passes its audit", 0.0, "" if found.ok and found.finished else "; ".join(problems) or "open"
    )


def main() -> None:
    """Run all cases; exit code 1 when the run did not survive one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/soak.json")
    parser.add_argument("--model", type=Path, help="directory of the initial model (default: build one)")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if NAMESPACE not in os.environ:
        command = [*disk.private_mounts(), sys.executable, "-W", "ignore", "-m", "e2e.soak", *sys.argv[1:]]
        os.execvpe(command[0], command, os.environ | {NAMESPACE: "1", "PYTHONPATH": os.getcwd()})
    time_limit.limit("e2e.soak", options.timeout)
    cases = [case for case in CASES if not options.names or name_of(*case) in options.names]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rljob-soak-", ignore_cleanup_errors=True) as scratch:
        directory, model, manifest = (Path(scratch) / name for name in ("run", "model", "job.yaml"))
        directory.mkdir()
        if options.model is None:
            build(model, Task.model_validate(SUMS), seed=1, recipe=Recipe(working_steps=200, bare_steps=20))
        write_manifest(manifest, options.model or model, STEPS_PER_CASE * len(cases) + 3)
        with disk.small_disk(directory, DISK_BYTES):
            outcomes = asyncio.run(Soak(directory).run(manifest, cases))
            outcomes.append(check_ledger(directory))
    for outcome in outcomes:
        sys.stderr.write(f"{outcome.case:50} {outcome.seconds:6.1f} s  {outcome.problem or 'survived'}\n")
    bad = sum(bool(outcome.problem) for outcome in outcomes)
    figures = {"seconds": time.monotonic() - began, "cases": [asdict(outcome) for outcome in outcomes]}
    report("soak", figures, {"not_survived": target(bad, "<=", 0)}, options.json)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
