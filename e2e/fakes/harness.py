"""Runs the components of a job for a test: as processes that are restarted when they die, or in the test's event loop.

A test waits for log lines of components, never for time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import web

from e2e.fakes.engine import FakeEngine, Faults
from e2e.fakes.fork_server import Child, descriptor, shared_fork_server
from e2e.fakes.model import write_model
from e2e.fakes.reward import ScoreFunction, build_app, by_text
from e2e.fakes.trainer import FakeTrainer
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.free_port import free_port
from rljob.runner.app import serve
from rljob.runner.main import find_readers
from rljob.runner.setup import prepare

TOKENS = {role: f"{role}-secret" for role in ("agent", "runner", "trainer", "reward", "owner")}
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "coordinator": ["-m", "rljob.coordinator.main"],
    "runner": ["-m", "rljob.runner.main"],
    "agent": ["-m", "e2e.fakes.engine"],
    "trainer": ["-m", "e2e.fakes.trainer"],
    "reward": ["-m", "e2e.fakes.reward"],
}
IMPORTS = (
    *(module for _, module in COMMANDS.values()),
    "rljob.coordinator.serve",
    "rljob.runner.app",
    "rljob.runner.data.reasoning_gym_source",
    "uvicorn.protocols.http.h11_impl",
    "uvloop",
    "websockets.server",
    "pydantic.v1",
    "encodings.idna",
)
"""Modules of the components, and those that they import at their start."""


def make_job(**changes: Any) -> RLJob:
    """Return a small resolved job; ``changes`` replace sections of its spec."""
    spec = {
        "seed": 11,
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 8, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 0},
        "algorithm": {"groupFilter": "nonconstant"},
        "tasks": [
            {
                "name": "sums",
                "weight": 2,
                "data": {"reasoningGym": {"dataset": "chain_sum", "config": {"max_digits": 2}}},
                "reward": "coin",
                "sampling": {"maxTokens": 100},
            },
            {
                "name": "products",
                "data": {"reasoningGym": {"dataset": "products"}},
                "prompt": "Q: {question}\nA:",
                "reward": "coin",
                "sampling": {"maxTokens": 50},
            },
        ],
        "rewards": [{"name": "coin", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main"}],
        "checkpoints": {"everySteps": 3, "keep": 2},
    }
    return resolve(RLJob.model_validate({"metadata": {"name": "test"}, "spec": {**spec, **changes}}))


class Harness:
    """The components of one job in one directory.

    Args:
        job: the resolved manifest.
        storage: the run directory; component NAME logs to NAME.log in it.
        variables: additional environment variables of components that are processes.
    """

    def __init__(self, job: RLJob, storage: Path, variables: Mapping[str, str] | None = None) -> None:
        self.job = job
        self.storage = storage
        self.restarts: dict[str, int] = {}
        self.codes: dict[str, int] = {}  # component → exit code of its last process
        self._urls = {component: f"127.0.0.1:{free_port()}" for component in ("coordinator", "reward")}
        self._extra_variables = dict(variables or {})
        self._processes: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._lines: list[tuple[str, str]] = []  # (component, line) in order of arrival
        self._read = 0
        self._changed = asyncio.Event()
        self._stopping = False
        write_model(storage / "model")
        (storage / "job.json").write_text(job.model_dump_json(by_alias=True))
        (storage / "tokens.json").write_text(json.dumps(TOKENS))

    @property
    def coordinator_url(self) -> str:
        """Address of the coordinator."""
        return f"http://{self._urls['coordinator']}"

    @property
    def reward_urls(self) -> dict[str, str]:
        """Address of every reward."""
        return {reward.name: f"http://{self._urls['reward']}" for reward in self.job.spec.rewards}

    def environment(self, component: str) -> ComponentEnvironment:
        """Return the environment of a component inside this process."""
        return ComponentEnvironment(
            job=self.job,
            storage=self.storage,
            coordinator=self.coordinator_url,
            token=TOKENS.get(component, ""),
            listen=self._urls.get(component, ""),
            name=self.job.spec.rollouts[0].name,
            host="127.0.0.1",
        )

    def variables(self, component: str) -> dict[str, str]:
        """Return the environment variables of a component that is a process."""
        return {
            "RLJOB_JOB": str(self.storage / "job.json"),
            "RLJOB_STORAGE": str(self.storage),
            "RLJOB_COORDINATOR": self.coordinator_url,
            "RLJOB_TOKEN": TOKENS.get(component, ""),
            "RLJOB_TOKENS": str(self.storage / "tokens.json"),
            "RLJOB_LISTEN": self._urls.get(component, ""),
            "RLJOB_NAME": self.job.spec.rollouts[0].name,
            "RLJOB_REWARD_URLS": json.dumps(self.reward_urls),
            **self._extra_variables,
        }

    def trainer(self, **options: Any) -> FakeTrainer:
        """Return a trainer to be run inside this process."""
        return FakeTrainer(self.coordinator_url, TOKENS["trainer"], self.job, self.storage, **options)

    def ledger(self, query: str) -> list[sqlite3.Row]:
        """Return the rows of a query of the run's ledger."""
        connection = sqlite3.connect(self.storage / "ledger.sqlite")
        connection.row_factory = sqlite3.Row
        rows = connection.execute(query).fetchall()
        connection.close()
        return rows

    # --- processes ---

    async def start(self, component: str, *arguments: str) -> None:
        """Start a component and restart it whenever it dies; exit code 0 ends it."""
        self.restarts[component] = -1
        self._tasks[component] = asyncio.create_task(self._keep(component, arguments), name=component)

    def kill(self, component: str) -> None:
        """Kill a component with SIGKILL."""
        self._processes[component].kill()

    async def until(self, component: str, text: str) -> None:
        """Wait until ``component`` has logged a line with ``text`` after the last line that was found."""
        while True:
            while self._read < len(self._lines):
                self._read += 1
                source, line = self._lines[self._read - 1]
                if source == component and text in line:
                    return
            self._changed.clear()
            await self._changed.wait()

    async def ended(self, component: str) -> None:
        """Wait until ``component`` exits with 0.

        Raises:
            RuntimeError: it exited with 2 (configuration error).
        """
        await self._tasks[component]

    def play(self, component: str, work: Awaitable[None]) -> None:
        """Run a component inside this process."""
        self._tasks[component] = asyncio.ensure_future(work)

    async def close(self) -> None:
        """Stop everything."""
        self._stopping = True
        for process in self._processes.values():
            process.terminate()
        for component, task in self._tasks.items():
            if component not in self.restarts:  # played inside this process
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _keep(self, component: str, arguments: tuple[str, ...]) -> None:
        environment = os.environ | self.variables(component) | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
        program = [*COMMANDS[component], *arguments]
        while not self._stopping:
            self.restarts[component] += 1
            read, write = os.pipe()
            server = shared_fork_server(*IMPORTS)
            process = await asyncio.wrap_future(server.start(program, environment, os.devnull, descriptor(write)))
            os.close(write)
            self._processes[component] = process
            if self._stopping:  # `close` did not see this process
                process.terminate()
            with (self.storage / f"{component}.log").open("ab") as log:
                async for line in _lines_of(read):
                    log.write(line)
                    log.flush()
                    self._lines.append((component, line.decode(errors="replace")))
                    self._changed.set()
            code = self.codes[component] = await process.wait()
            if code == 0:
                return
            if code == 2:
                raise RuntimeError(f"{component} exited with 2; see {self.storage / component}.log")


@asynccontextmanager
async def run_harness(
    job: RLJob,
    storage: Path,
    engines: Sequence[Faults] = (Faults(),),
    seconds_per_token: float = 0.0,
    score_function: ScoreFunction = by_text,
    pods: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    runner_process: bool = False,
    environment_urls: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Harness]:
    """Run all components except the trainer: the coordinator as a process, the others inside this one.

    Args:
        job: the resolved manifest.
        storage: the run directory.
        engines: the faults of each engine; one engine is started for each entry.
        seconds_per_token: generation time per token of every engine.
        score_function: used by the reward service.
        pods: names of the engines' pods.
        variables: additional environment variables of the coordinator.
        runner_process: whether the runner is also started as a process.
        environment_urls: address of every environment, which requires no token.
    """
    given = {"RLJOB_ENVIRONMENT_URLS": json.dumps(dict(environment_urls))} if environment_urls else {}
    harness = Harness(job, storage, {**given, **(variables or {})})
    reward = web.AppRunner(build_app(score_function), access_log=None)
    await reward.setup()
    where = harness.environment("reward")
    await web.TCPSite(reward, where.listen_host, where.listen_port).start()
    try:
        await harness.start("coordinator")
        if runner_process:
            await harness.start("runner")
        else:
            prepared = prepare(harness.environment("runner"), find_readers(job))
            harness.play("runner", serve(prepared, harness.reward_urls, environment_urls=environment_urls))
        for i, faults in enumerate(engines):
            engine = FakeEngine(
                harness.coordinator_url,
                TOKENS["agent"],
                seconds_per_token=seconds_per_token,
                faults=faults,
                pod=pods[i] if pods else "",
            )
            harness.play(f"agent-{i}", engine.run())
        yield harness
    finally:
        await harness.close()
        await reward.cleanup()


async def _lines_of(pipe: int) -> AsyncIterator[bytes]:
    """Return the lines of a pipe; close it at its end."""
    reader = asyncio.StreamReader()
    with open(pipe, "rb", buffering=0) as file:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        try:
            async for line in reader:
                yield line
        finally:
            transport.close()
