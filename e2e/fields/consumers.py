"""What the parts make of a job. Each function asks the code that reads a field and returns what came of it.

All take a resolved job and the storage its files are in, and give the same for the same job.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import torch

from coordinator.tests import world as coordinators_world
from rljob.api.extensions import BACKENDS, load
from rljob.api.job_status import Progress
from rljob.api.models import RLJob
from rljob.cli.options import default_directory
from rljob.coordinator import serve
from rljob.coordinator.run import Run, settings_of
from rljob.ledger.writer import LedgerWriter
from rljob.local import commands as local_commands
from rljob.local import field_support, local_run, watchdog
from rljob.local.commands import LocalContext
from rljob.local.component_supervisor import RestartBackoff, Supervisor
from rljob.local.errors import CliError
from rljob.local.processes import Interrupt, ProcessCommand
from rljob.local.run_directory import ROLES, RunDirectory
from rljob.protocol import initializer_stamp, messages
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.run_status import RunStatus
from rljob.protocol.score_messages import ScoreItem
from rljob.rewards import sdk
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.main import make_evaluator
from rljob.rollout.adapters.load_adapter import load_adapter
from rljob.runner import app
from rljob.runner.leased_trajectory import LeasedTrajectory
from rljob.runner.main import find_readers
from rljob.runner.setup import prepare
from rljob.trainer.backends.base import Backend
from rljob.trainer.batch import Row, lay_out
from rljob.trainer.loop import TrainerLoop
from rljob.trainer.process_group import join_world, leave_world, make_deterministic
from rljob.trainer.step import apply_batch
from rljob.transfer.rounds import digest

SPLITS = ("train", "heldOut")


def environment(job: RLJob, storage: Path) -> ComponentEnvironment:
    """Return what a part is told."""
    pool = job.spec.rollouts[0].name
    return ComponentEnvironment(job, storage, "http://127.0.0.1:1", "token", "127.0.0.1:2", pool, "127.0.0.1")


# --- local ------------------------------------------------------------------------------------------------------------


def commands(job: RLJob, storage: Path) -> Any:
    """Return the processes that `rljob run` starts."""
    ports = {server: 7000 + i for i, server in enumerate(local_commands.servers(job))}
    here = LocalContext(storage, ports, dict.fromkeys(ROLES, "token"))
    return [(part.name, part.arguments, part.environment) for part in local_commands.components(job, here)]


def initialized(job: RLJob, storage: Path) -> Any:
    """Return the key by which the initializer's work is known; another key runs it anew."""
    return initializer_stamp.content_key(job) if job.spec.initializer else None


def prepared(job: RLJob, storage: Path) -> Any:
    """Return the process that makes what the other parts need."""
    if job.spec.initializer is None:
        return None
    made = local_commands.initializer(job, storage)
    return made.arguments, made.environment


def directory(job: RLJob, storage: Path) -> Any:
    """Return where the job runs when nothing else is said."""
    return default_directory(None, job.metadata.name)


def refusals(job: RLJob, storage: Path) -> Any:
    """Return why `rljob run` does not run it."""
    return field_support.errors(job)


def restarts(job: RLJob, storage: Path) -> Any:
    """Return how often a part that dies at once is started, and how long it may hang."""
    events: list[str] = []
    patience: list[float] = []

    async def hung(heartbeat: Path, mark: str, seconds: float) -> None:
        patience.append(seconds)
        await asyncio.Event().wait()

    async def keep() -> None:
        policy = job.spec.failure_policy.model_copy(
            update={"max_restarts": min(3, job.spec.failure_policy.max_restarts)}
        )
        with tempfile.TemporaryDirectory() as place, mock.patch.object(watchdog, "wait_until_hung", hung):
            (Path(place) / "logs").mkdir()
            part = Supervisor(
                ProcessCommand("part", ["/bin/false"]),
                Path(place),
                policy,
                lambda name, event, **_: events.append(event),
                RestartBackoff(0.0, 0.0),
            )
            with contextlib.suppress(CliError):
                await part.run(Interrupt())

    asyncio.run(keep())
    return events, patience


def grace(job: RLJob, storage: Path) -> Any:
    """Return how long a run that is told to stop waits for its checkpoint."""
    given: list[float] = []

    async def sleep(seconds: float) -> None:
        given.append(seconds)

    async def for_ever(_: LocalContext) -> None:
        await asyncio.Event().wait()

    async def stop() -> None:
        run = local_run.LocalRun(job, RunDirectory(storage), mock.Mock(), local_commands.components, None)
        run._status = RunStatus(state="Running", progress=Progress(step=1))
        here = LocalContext(storage, {"coordinator": 1}, dict.fromkeys(ROLES, "token"))
        going_on = asyncio.create_task(for_ever(here))
        with mock.patch.object(asyncio, "sleep", sleep), mock.patch.object(run, "_save", for_ever):
            await run._suspend(Interrupt(), here, [going_on])
        going_on.cancel()

    asyncio.run(stop())
    return given


def overtime(job: RLJob, storage: Path) -> Any:
    """Return what is said of a run that has been up for an hour."""
    run = local_run.LocalRun(job, RunDirectory(storage), mock.Mock(), local_commands.components, None)
    try:
        run._refuse_overtime(RunStatus(state="Running", progress=Progress(seconds=3600)))
    except CliError as error:
        return error.sentence
    return None


# --- coordinator ------------------------------------------------------------------------------------------------------


def scheduled(job: RLJob, storage: Path) -> Any:
    """Return the scheduler's settings."""
    return settings_of(job.spec)


@contextlib.contextmanager
def _run(job: RLJob) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as place:
        ledger = LedgerWriter(Path(place))
        yield Run(job.spec, ledger)
        ledger.close()


def admitted(job: RLJob, storage: Path) -> Any:
    """Return how many groups are started at first, and the tasks of groups."""
    with _run(job) as run:
        at_first = run.scheduler.admissible()
        run.scheduler.version = 100  # so that many may be admitted
        return at_first, [run.scheduler.admit().task for _ in range(16)]


class _Recording(coordinators_world.FakePeer):
    """A connection that keeps what was sent."""

    sent: ClassVar[list[Any]] = []

    def take(self) -> list[Any]:
        taken = super().take()
        self.sent.extend(taken)
        return taken


class _Inexact(coordinators_world.Agent):
    """An engine whose log-probabilities are not quite the trainer's."""

    def say(self, *said: Any) -> None:
        for message in said:
            acknowledged = isinstance(message, messages.WeightAck)
            super().say(msgspec.structs.replace(message, probe_error=5e-5) if acknowledged else message)


def told(job: RLJob, storage: Path) -> Any:
    """Return what the coordinator tells runner, engines and trainer in a whole run, how that ends, and which pools make
    samples of training (g…) and of evaluations (e…)."""

    async def play() -> Any:
        with tempfile.TemporaryDirectory() as place:
            pools = [pool.name for pool in job.spec.rollouts]
            world = coordinators_world.World(job, Path(place), pools)
            world.agents = [_Inexact(world, f"engine-{i}", pool) for i, pool in enumerate(pools)]
            await world.start()
            world.connect_all()
            await world.settle()
            failure, results = world.run.failure, world.run.evaluations.results
            uses = {(sample[0], agent.pool) for agent in world.agents for sample, _, _ in agent.generated}
            world.close()
            return failure, [(result.version, result.task, result.problems) for result in results], uses

    _Recording.sent = []
    with mock.patch.object(coordinators_world, "FakePeer", _Recording):
        ends = asyncio.run(play())
    drives = collections.Counter(
        (sent.task, sent.split) for sent in _Recording.sent if isinstance(sent, messages.LeaseTrajectory)
    )
    return ends, drives, sorted(set(map(repr, map(_essence, _Recording.sent))))


def _essence(message: Any) -> Any:
    """Return what of a message does not depend on which part was quicker."""
    match message:
        case messages.Generate():
            return message.sampling.temperature, message.sampling.max_tokens
        case messages.Train():
            return message.step, len(message.samples), len({sample.group for sample in message.samples})
        case messages.PrepareWeights():
            return message.version, message.in_flight, message.bucket_bytes, message.timeout_seconds
        case messages.Checkpoint():
            return message.step, message.remove
        case _:
            return type(message).__name__


def tracked(job: RLJob, storage: Path) -> Any:
    """Return whether event files are written."""
    started = {name: mock.DEFAULT for name in ("LedgerWriter", "check_same_job", "Run", "uvicorn", "build_app")}
    with (
        tempfile.NamedTemporaryFile("w") as tokens,
        tempfile.NamedTemporaryFile("w") as manifest,
        mock.patch.dict(os.environ, RLJOB_TOKENS=tokens.name, RLJOB_JOB=manifest.name),
        mock.patch.multiple(serve, **started),
        mock.patch.object(serve, "TrackingWriter", side_effect=_EnoughError) as tracking,
        contextlib.suppress(_EnoughError),
    ):
        tokens.write("{}")
        tokens.flush()
        manifest.write(job.model_dump_json(by_alias=True))
        manifest.flush()
        asyncio.run(serve.serve(environment(job, storage)))
    return tracking.call_args.args[1]


class _EnoughError(Exception):
    """What was to be seen was seen."""


# --- runner -----------------------------------------------------------------------------------------------------------


def prompts(job: RLJob, storage: Path) -> Any:
    """Return the first problems and prompts of every task and split, and the splits' sizes."""
    found = []
    with _files_that_stay_open():
        prepared = prepare(environment(job, storage), find_readers(job))
        for task, source in prepared.sources.items():
            for split in SPLITS:
                size = source.size(split)
                rows = range(min(6, size if size is not None else 6))
                made = [prepared.maker.make(task, source.problem(split, row)) for row in rows]
                found.append((task, split, size, [(prompt.text, prompt.token_ids, prompt.problem) for prompt in made]))
        del prepared, source
    return found


@contextlib.contextmanager
def _files_that_stay_open() -> Iterator[None]:
    """Inside, files may be left to the garbage collector: a runner reads its data to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def asked(job: RLJob, storage: Path) -> Any:
    """Return what a runner asks of the engines for each task and split, and where it asks for rewards."""
    found: list[Any] = []

    class OneOfEach:
        """In the runner's place: drives one trajectory of every task and split up to its first request."""

        def __init__(self, url: str, token: str, kits: Any, book: Any, codec: Any, held_out: Any) -> None:
            self.kits, self.book, self.codec = kits, book, codec

        async def run(self) -> None:
            for task, kit in self.kits.items():
                found.append(kit.reward.url)
                for split in SPLITS:
                    need: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                    drive = messages.LeaseTrajectory(sample="s", task=task, row=0, split=split, turns=[])
                    trajectory = LeasedTrajectory(drive, kit, self.book, self.codec, need.set_result)
                    found.append(await need)
                    trajectory.cancel()

        def close(self) -> None:
            """Nothing is open."""

    with _files_that_stay_open():
        _ask(job, storage, OneOfEach)
    return found


class _Address:
    """In the place of a reward's client: where it would ask."""

    def __init__(self, reward: Any, url: str, session: Any) -> None:
        self.url = url

    async def wait_until_reachable(self) -> None:
        """Nobody is there."""

    async def close(self) -> None:
        """Nothing is open."""


def _ask(job: RLJob, storage: Path, driver: type) -> None:
    prepared = prepare(environment(job, storage), find_readers(job))
    with mock.patch.object(app, "RunnerDriver", driver), mock.patch.object(app, "RewardClient", _Address):
        asyncio.run(app.serve(prepared, {reward.name: f"http://{reward.name}" for reward in job.spec.rewards}))


def loops(job: RLJob, storage: Path) -> Any:
    """Return the loop of each task."""
    found: list[Any] = []

    class Driver:
        def __init__(self, url: str, token: str, runtimes: Any, *rest: Any) -> None:
            found.extend((name, runtime.loop) for name, runtime in runtimes.items())

        async def run(self) -> None:
            """End at once."""
            raise asyncio.CancelledError

        def close(self) -> None:
            """Nothing is open."""

    _ask(job, storage, Driver)
    return found


# --- rewards ----------------------------------------------------------------------------------------------------------


def served(job: RLJob, storage: Path) -> Any:
    """Return the workers of the first reward's service, and how long they may take."""
    with mock.patch.object(sdk, "Pool") as pool, mock.patch.object(sdk, "uvicorn"), mock.patch.object(sdk, "build_app"):
        sdk.run(RewardEvaluator(lambda: 0.0, ""), job.spec.rewards[0], "127.0.0.1:1")
    return pool.call_args.args[1:]


def scored(job: RLJob, storage: Path) -> Any:
    """Return the scores of the first reward for answers to a made-up problem."""
    evaluate = make_evaluator(job.spec, 0)
    problem = {"question": "?", "answer": "4", "result": "5", "metadata": {}}
    items = [ScoreItem("s", "sums", "?", answer, "stop", problem) for answer in ("4", "5", "so it is 4")]
    return [evaluate(item) for item in items]


# --- rollout ----------------------------------------------------------------------------------------------------------


def launched(job: RLJob, storage: Path) -> Any:
    """Return the command of every pool's engine server."""
    place = environment(job, storage)
    models = {model.name: place.path(model.source) for model in job.spec.models}
    pools = enumerate(job.spec.rollouts)
    return [load_adapter(job.spec, i, models[pool.model]).launch(1, "key").command for i, pool in pools]


# --- trainer ----------------------------------------------------------------------------------------------------------


def trained(job: RLJob, storage: Path) -> Any:
    """Return weights and microbatches after two steps on made-up samples."""
    torch.set_num_threads(1)
    world = join_world()
    make_deterministic(world.device)
    try:
        spec = job.spec
        factory = load(BACKENDS, spec.trainer.backend, "spec.trainer.backend")
        backend: Backend = factory(environment(job, storage).path(spec.models[0].source), spec.trainer, world)
        microbatches = []
        for step in range(2):
            train, rows = _batch(step)
            budget = spec.trainer.microbatch_tokens
            batch = lay_out(train, rows, spec.algorithm, world, budget)
            microbatches.append([[inputs.indices for inputs in minibatch] for minibatch in batch.minibatches])
            apply_batch(train, rows, spec.algorithm, backend, world, budget)
        weights = [(name, tensor.clone()) for name, tensor in backend.named_tensors()]
        return digest(weights), microbatches
    finally:
        leave_world()
        torch.use_deterministic_algorithms(False)


def _batch(step: int) -> tuple[messages.Train, dict[int, Row]]:
    """Return a batch of random sequences whose engine log-probabilities are noise, and its rows."""
    generator = np.random.default_rng(step)
    samples, rows = [], {}
    for i in range(12):
        prompt, response = 3, int(generator.integers(2, 12))
        ids = generator.integers(0, 200, prompt + response)
        mask = np.arange(len(ids)) >= prompt
        logprobs = np.where(mask, -5.0 + 0.6 * generator.standard_normal(len(ids)), 0).astype(np.float32)
        samples.append(
            messages.BatchSample(
                sample=f"{i // 3}.{i % 3}",
                group=str(i // 3),
                reward=float((i * 7 + i // 5) % 3),
                prompt_tokens=prompt,
                response_tokens=response,
                total_tokens=prompt + response,
                min_version=0,
                temperature=1.0,
                max_tokens=16,
            )
        )
        rows[i] = Row(ids, logprobs, mask, np.zeros(len(ids)))
    return messages.Train(incarnation=1, step=step, samples=samples, check_initial_logprobs=False), rows


def published(job: RLJob, storage: Path) -> Any:
    """Return how the trainer sends weights."""
    loop = object.__new__(TrainerLoop)
    loop._job, loop._environment = job, environment(job, storage)
    loop._world = mock.Mock(device=torch.device("cpu"))
    with mock.patch("rljob.trainer.loop.WeightSender") as sender:
        publisher = loop._make_publisher()
    return sender.call_args.args, publisher._transport, loop._wire_device
