"""The twenty faults that matter most, with everything real: `rljob run`, vLLM, the FSDP trainer. Prints a table.

python -m e2e.soak [--json] [NAME...]. One run suffers all of them, one after the other; it must go on after each, end
well, and pass its audit. --json also writes benchmarks/results/soak.json.
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

from benchmarks.report import report, target
from e2e.faults import disk
from e2e.faults.proxy import Moment, Proxy, Trigger
from rljob.api.resolve import DEFAULT_PROMPT
from rljob.api.tasks import Task
from rljob.ledger.audit import audit
from rljob.protocol import messages as m
from rljob.trainer.example_model import Recipe, build

HANG_SECONDS = 5.0
FULL_SECONDS = 5.0
PATIENCE_SECONDS = 180.0
DISK_BYTES = 256 << 20
STEPS_PER_CASE = 3
NAMESPACE = "RLJOB_SOAK_NAMESPACE"
PARTS = {"agent": "rollout-main-0", "reward": "reward-sums"}  # what they are called in a run, where that differs

CASES = [
    ("kill", "server", "generation", Moment("agent", "Generate", "after")),
    ("kill", "agent", "generation", Moment("agent", "Completions", "after")),
    ("kill", "runner", "reward", Moment("reward", "Score", "before")),
    ("kill", "reward", "reward", Moment("reward", "Score", "before")),
    ("kill", "trainer", "training", Moment("trainer", "Pull", "after")),
    ("kill", "trainer", "checkpoint", Moment("trainer", "Checkpoint", "after")),
    ("kill", "coordinator", "batch", Moment("trainer", "Train", "before")),
    ("kill", "coordinator", "update", Moment("trainer", "WeightsReady", "after")),
    ("kill", "trainer", "update", Moment("trainer", "SendWeights", "after")),
    ("kill", "server", "update", Moment("agent", "PrepareWeights", "after")),
    ("kill", "agent", "update", Moment("agent", "WeightAck", "before")),
    ("hang", "server", "generation", Moment("agent", "Generate", "after")),
    ("hang", "agent", "update", Moment("agent", "PrepareWeights", "after")),
    ("hang", "trainer", "update", Moment("trainer", "SendWeights", "after")),
    ("hang", "coordinator", "training", Moment("trainer", "StepDone", "before")),
    ("hang", "runner", "generation", Moment("runner", "Generated", "after")),
    ("hang", "reward", "reward", Moment("reward", "Score", "before")),
    ("cut", "agent", "update", Moment("agent", "PrepareWeights", "after")),
    ("cut", "trainer", "training", Moment("trainer", "Train", "after")),
    ("cut", "coordinator", "generation", Moment("agent", "Completions", "before")),
    ("full", "all", "checkpoint", Moment("trainer", "Checkpoint", "before")),
    ("full", "all", "generation", Moment("agent", "Completions", "before")),
]
"""(fault, victim, phase, when). Faults as in e2e.faults.cases; ``server`` is the vLLM server."""

SUMS: dict[str, Any] = {
    "name": "sums",
    "data": {"reasoningGym": {"dataset": "chain_sum", "config": {"max_terms": 3, "max_digits": 1}}},
    "prompt": DEFAULT_PROMPT,
    "reward": "sums",
    "sampling": {"maxTokens": 32},
}


@dataclass
class Outcome:
    """What came of a case: seconds from the fault to the next batch applied."""

    case: str
    seconds: float
    problem: str


def name_of(fault: str, victim: str, phase: str, moment: Moment) -> str:
    """Return the case's name."""
    return f"{fault}-{victim}-{phase}-{moment.when}-{moment.message}"


def write_manifest(path: Path, model: Path, steps: int) -> None:
    """Write the job that suffers."""
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


class RunEndedError(Exception):
    """The run ended before all cases had happened."""


class Soak:
    """One `rljob run` behind a proxy.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.applied = 0
        self._news = asyncio.Event()
        self.proxy = Proxy("http://127.0.0.1:1", {"sums": "http://127.0.0.1:1"}, self._hear)

    async def run(self, manifest: Path, cases: list[tuple[str, str, str, Moment]]) -> list[Outcome]:
        """Start the run, let all cases happen, and see it to its end."""
        outcomes = []
        async with self.proxy:
            with self.directory.with_suffix(".out").open("wb") as out:
                command = ["-m", "e2e.faults.through_proxy", self.proxy.url, "run", str(manifest)]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *command, "--run-dir", str(self.directory), "--no-screen", stdout=out, stderr=out
                )
            ended = asyncio.create_task(process.wait())
            try:
                await self._find_servers(ended)
                for case in cases:
                    outcomes.append(await self._try(*case, ended))
                    if ended.done():
                        break
                    sys.stderr.write(f"{outcomes[-1].case:50} {outcomes[-1].seconds:6.1f} s {outcomes[-1].problem}\n")
                async with asyncio.timeout(2 * PATIENCE_SECONDS):
                    outcomes.append(Outcome("the run ends well", 0.0, "" if await ended == 0 else self._last_words()))
            finally:
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                    process.send_signal(signal.SIGTERM)
                    await ended
        return outcomes

    async def _find_servers(self, ended: asyncio.Task[int]) -> None:
        file = self.directory / "ports.json"
        while not file.exists():
            assert not ended.done(), self._last_words()
            await asyncio.sleep(0.1)  # another process writes it
        ports = json.loads(file.read_bytes())
        self.proxy.coordinator = f"http://127.0.0.1:{ports['coordinator']}"
        self.proxy.rewards = {"sums": f"http://127.0.0.1:{ports['reward-sums']}"}

    async def _try(self, fault: str, victim: str, phase: str, moment: Moment, ended: asyncio.Task[int]) -> Outcome:
        name, began, problem = name_of(fault, victim, phase, moment), time.monotonic(), ""

        def strike() -> None:
            nonlocal began
            began = time.monotonic()
            self._strikes(victim)[fault]()

        trigger = self.proxy.trigger = Trigger(moment, strike)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._first(trigger.struck.wait(), ended)
                wanted = self.applied + 1
                while self.applied < wanted:
                    self._news.clear()
                    await self._first(self._news.wait(), ended)
        except TimeoutError:
            problem = f"no batch was applied after it; {self._last_words()}"
        except RunEndedError as error:
            problem = str(error)
        return Outcome(name, time.monotonic() - began, problem)

    async def _first(self, awaitable: Any, ended: asyncio.Task[int]) -> None:
        waiting = asyncio.ensure_future(awaitable)
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise RunEndedError(f"the run ended with {ended.result()}: {self._last_words()}")

    def _hear(self, part: str, message: Any) -> None:
        if isinstance(message, m.StepDone) and message.step >= self.applied:
            self.applied = message.step + 1
            self._news.set()

    def _strikes(self, victim: str) -> dict[str, Callable[[], None]]:
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
        part = PARTS.get(victim, victim)
        return [e["pid"] for e in map(json.loads, lines) if (e["subject"], e["event"]) == (part, "started")][-1]

    def _last_words(self) -> str:
        return self.directory.with_suffix(".out").read_text()[-1500:]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # gone
        return -1


def verdict(directory: Path) -> Outcome:
    """Return what the audit says."""
    found = audit(directory)
    problems = [problem for check in found.checks for problem in check.problems]
    return Outcome("its accounts are right", 0.0, "" if found.ok and found.finished else "; ".join(problems) or "open")


def main() -> None:
    """Run all of it; exit code 1 when something did not survive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="cases; all when left out")
    parser.add_argument("--json", action="store_true", help="keep the figures")
    parser.add_argument("--model", type=Path, help="the policy to begin with; built when left out")
    options = parser.parse_args()
    if NAMESPACE not in os.environ:
        command = [*disk.private_mounts(), sys.executable, "-W", "ignore", "-m", "e2e.soak", *sys.argv[1:]]
        os.execvpe(command[0], command, os.environ | {NAMESPACE: "1", "PYTHONPATH": os.getcwd()})
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
            outcomes.append(verdict(directory))
    for outcome in outcomes:
        sys.stderr.write(f"{outcome.case:50} {outcome.seconds:6.1f} s  {outcome.problem or 'survived'}\n")
    bad = sum(bool(outcome.problem) for outcome in outcomes)
    figures = {"seconds": time.monotonic() - began, "cases": [asdict(outcome) for outcome in outcomes]}
    report("soak", figures, {"not_survived": target(bad, "<=", 0)}, options.json)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
