"""Consumers of manifest fields. Each function calls the code that reads a field and returns the result.

All functions take a resolved job and the directory of its files, and are deterministic.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import torch

from coordinator.tests import world as coordinator_world
from rljob.api.extensions import BACKENDS, load
from rljob.api.job_status import Progress
from rljob.api.memory_checks import describe_plan
from rljob.api.model_shape import ModelShape
from rljob.api.models import RLJob
from rljob.cli.options import default_directory
from rljob.coordinator import serve
from rljob.coordinator.earlier_steps import MEASURED_KL, EarlierStepsHistory
from rljob.coordinator.run import Run
from rljob.coordinator.scheduler_settings import scheduler_settings
from rljob.environments import environment_service
from rljob.environments.episode import Calls, Episode
from rljob.ledger.writer import LedgerWriter
from rljob.local import commands as local_commands
from rljob.local import field_support, local_run, watchdog
from rljob.local.commands import LocalContext
from rljob.local.component_supervisor import RestartBackoff, Supervisor
from rljob.local.errors import CliError
from rljob.local.processes import Interrupt, ProcessCommand
from rljob.local.run_directory import ROLES, RunDirectory
from rljob.protocol import initializer_stamp
from rljob.protocol.agent_protocol import Generate, PrepareWeights, WeightAck
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.checkpoint_copies import open_copies
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.gpus import Gpu
from rljob.protocol.run_status import RunStatus
from rljob.protocol.runner_protocol import LeaseTrajectory
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.protocol.trainer_protocol import Checkpoint, Train
from rljob.rewards import sdk
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.main import make_evaluator
from rljob.rollout.adapters.load_adapter import load_adapter
from rljob.runner import app
from rljob.runner.cut_answer import answer_text
from rljob.runner.leased_trajectory import LeasedTrajectory
from rljob.runner.main import find_readers
from rljob.runner.reward_http import RefusedSampleError, RewardHttp
from rljob.runner.reward_routing import scorer_of
from rljob.runner.scoring import RewardClient
from rljob.runner.setup import prepare
from rljob.trainer.backends.base import Backend, OptimizerUpdate, PacksRows
from rljob.trainer.backends.megatron import supported_layouts
from rljob.trainer.backends.megatron.megatron_library import parallel_state
from rljob.trainer.backends.megatron.process_grid import make_grid
from rljob.trainer.batch import Row
from rljob.trainer.errors import ModelError, UnrecoverableError
from rljob.trainer.frozen_models import load_critic, load_models, read_sources
from rljob.trainer.loop import TrainerLoop
from rljob.trainer.process_group import join_world, leave_world, make_deterministic
from rljob.trainer.step import apply_batch, plan_step
from rljob.trainer.step_checks import StepChecks
from rljob.transfer.packed_weights import pack

SPLITS = ("train", "heldOut")


def environment(job: RLJob, storage: Path) -> ComponentEnvironment:
    """Return the environment of a component."""
    pool = job.spec.rollouts[0].name
    return ComponentEnvironment(job, storage, "http://127.0.0.1:1", "token", "127.0.0.1:2", pool, "127.0.0.1")


# --- local ------------------------------------------------------------------------------------------------------------


def commands(job: RLJob, storage: Path) -> Any:
    """Return the processes that `rljob run` starts."""
    ports = {server: 7000 + i for i, server in enumerate(local_commands.servers(job))}
    here = LocalContext(storage, ports, dict.fromkeys(ROLES, "token"), (Gpu("0", 0), Gpu("1", 1)))
    return [(part.name, part.arguments, part.environment) for part in local_commands.components(job, here)]


def copied(job: RLJob, storage: Path) -> Any:
    """Return where the trainer copies checkpoints."""
    return str(open_copies(job.spec))


def initialized(job: RLJob, storage: Path) -> Any:
    """Return the content key of the initializer; a different key runs the initializer again."""
    return initializer_stamp.content_key(job) if job.spec.initializer else None


def prepared(job: RLJob, storage: Path) -> Any:
    """Return the command and environment of the initializer."""
    if job.spec.initializer is None:
        return None
    made = local_commands.initializer(job, storage)
    return made.arguments, made.environment


def directory(job: RLJob, storage: Path) -> Any:
    """Return the default run directory."""
    return default_directory(None, job.metadata.name)


def unsupported(job: RLJob, storage: Path) -> Any:
    """Return the errors with which `rljob run` rejects the job."""
    return field_support.errors(job, ())


def restarts(job: RLJob, storage: Path) -> Any:
    """Return the events of a component that exits at once, and the time after which it counts as hung."""
    events: list[str] = []
    hang_seconds: list[float] = []

    async def hung(heartbeat: Path, mark: str, seconds: float) -> None:
        hang_seconds.append(seconds)
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
    return events, hang_seconds


def grace(job: RLJob, storage: Path) -> Any:
    """Return how long a stopping run waits for its checkpoint."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def never_return(_: LocalContext) -> None:
        await asyncio.Event().wait()

    async def stop() -> None:
        run = local_run.LocalRun(job, RunDirectory(storage), mock.Mock(), local_commands.components, None)
        run._status = RunStatus(state="Running", progress=Progress(step=1))
        here = LocalContext(storage, {"coordinator": 1}, dict.fromkeys(ROLES, "token"))
        component = asyncio.create_task(never_return(here))
        with mock.patch.object(asyncio, "sleep", sleep), mock.patch.object(run, "_save", never_return):
            await run._suspend(Interrupt(), here, [component])
        component.cancel()

    asyncio.run(stop())
    return waits


def deadline_error(job: RLJob, storage: Path) -> Any:
    """Return the error of a run that has been running for an hour."""
    run = local_run.LocalRun(job, RunDirectory(storage), mock.Mock(), local_commands.components, None)
    try:
        run._refuse_overtime(RunStatus(state="Running", progress=Progress(seconds=3600)))
    except CliError as error:
        return error.sentence
    return None


# --- coordinator ------------------------------------------------------------------------------------------------------


def scheduled(job: RLJob, storage: Path) -> Any:
    """Return the scheduler's settings."""
    return scheduler_settings(job.spec)


@contextlib.contextmanager
def _run(job: RLJob) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as place:
        ledger = LedgerWriter(Path(place))
        yield Run(job.spec, ledger)
        ledger.close()


def admitted(job: RLJob, storage: Path) -> Any:
    """Return the number of groups that are admitted at first, and the tasks of the first 16 groups."""
    with _run(job) as run:
        at_first = run.scheduler.admissible()
        run.scheduler.version = 100  # permits the admission of many groups
        return at_first, [run.scheduler.admit().task for _ in range(16)]


class _Recording(coordinator_world.FakePeer):
    """A connection that records the messages sent."""

    sent: ClassVar[list[Any]] = []

    def take(self) -> list[Any]:
        taken = super().take()
        self.sent.extend(taken)
        return taken


class _Inexact(coordinator_world.Agent):
    """An engine whose log-probabilities differ slightly from the trainer's."""

    def say(self, *sent: Any) -> None:
        for message in sent:
            acknowledged = isinstance(message, WeightAck)
            super().say(
                msgspec.structs.replace(message, probe_error=5e-5, probe_mean=2e-5) if acknowledged else message
            )


def dispatched(job: RLJob, storage: Path) -> Any:
    """Return the messages of the coordinator to runner, engines and trainer in a complete run, the end of the run, and
    the pools that generate samples of training (g…) and of evaluations (e…)."""

    async def play() -> Any:
        with tempfile.TemporaryDirectory() as place:
            pools = [pool.name for pool in job.spec.rollouts]
            world = coordinator_world.World(job, Path(place), pools)
            world.agents = [_Inexact(world, f"engine-{i}", pool) for i, pool in enumerate(pools)]
            await world.start()
            world.connect_all()
            await world.settle()
            failure, results = world.run.failure, world.run.evaluations.results
            uses = {(sample[0], agent.pool) for agent in world.agents for sample, _, _ in agent.generated}
            world.close()
            return failure, [(r.version, r.task, r.problems, r.accuracy, r.pass_at) for r in results], uses

    _Recording.sent = []
    with mock.patch.object(coordinator_world, "FakePeer", _Recording):
        ends = asyncio.run(play())
    leases = collections.Counter(
        (sent.task, sent.split) for sent in _Recording.sent if isinstance(sent, LeaseTrajectory)
    )
    return ends, leases, sorted(set(map(repr, map(_stable_fields, _Recording.sent))))


def _stable_fields(message: Any) -> Any:
    """Return the fields of a message that do not depend on the timing of components."""
    match message:
        case Generate():
            return message.sampling.temperature, message.sampling.max_tokens
        case Train():
            return message.step, len(message.samples), len({sample.group for sample in message.samples})
        case PrepareWeights():
            return message.version, message.in_flight, message.bucket_bytes, message.timeout_seconds
        case Checkpoint():
            return message.step, message.remove
        case _:
            return type(message).__name__


def tracked(job: RLJob, storage: Path) -> Any:
    """Return whether event files are written."""
    started = {name: mock.DEFAULT for name in ("LedgerWriter", "check_same_job", "Run", "HttpServer", "build_app")}
    with (
        tempfile.NamedTemporaryFile("w") as tokens,
        tempfile.NamedTemporaryFile("w") as manifest,
        mock.patch.dict(os.environ, RLJOB_TOKENS=tokens.name, RLJOB_JOB=manifest.name),
        mock.patch.multiple(serve, **started),
        mock.patch.object(serve, "TrackingWriter", side_effect=_CapturedError) as tracking,
        contextlib.suppress(_CapturedError),
    ):
        tokens.write("{}")
        tokens.flush()
        manifest.write(job.model_dump_json(by_alias=True))
        manifest.flush()
        asyncio.run(serve.serve(environment(job, storage)))
    return tracking.call_args.args[1]


class _CapturedError(Exception):
    """Ends the coordinator's start: the arguments were captured."""


# --- runner -----------------------------------------------------------------------------------------------------------


def prompts(job: RLJob, storage: Path) -> Any:
    """Return the first problems and prompts of every task and split, and the splits' sizes."""
    found = []
    with _ignore_open_files():
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
def _ignore_open_files() -> Iterator[None]:
    """Ignore the ResourceWarning of open files: a runner keeps its data files open until it exits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def requested(job: RLJob, storage: Path) -> Any:
    """Return the first generation request of a runner for each task and split, and the addresses of its rewards."""
    found: list[Any] = []

    class OneOfEachDriver:
        """Replaces RunnerDriver: drives one trajectory of every task and split up to its first request."""

        def __init__(self, url: str, token: str, kits: Any, book: Any, codec: Any, *rest: Any, **others: Any) -> None:
            self.kits, self.book, self.codec = kits, book, codec

        async def run(self) -> None:
            for task, kit in self.kits.items():
                found.append((kit.reward.url, kit.stall_seconds))
                for split in SPLITS:
                    need: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                    lease = LeaseTrajectory(sample="s", task=task, row=0, split=split, turns=[])
                    trajectory = LeasedTrajectory(lease, kit, self.book, self.codec, need.set_result)
                    found.append(await need)
                    trajectory.cancel()

        def close(self) -> None:
            """Nothing is open."""

    with _ignore_open_files():
        _serve_with(job, storage, OneOfEachDriver)
    return found


def answered(job: RLJob, storage: Path) -> Any:
    """Return the text of an answer that ended with "b"."""
    codec = prepare(environment(job, storage), find_readers(job)).codec
    return answer_text(codec, job.spec.tasks[0].sampling, codec.encode("ab", special=False), "stop")


def routed(job: RLJob, storage: Path) -> Any:
    """Return the score of a row of the first task, whose rewards return their position from 1."""

    class Constant:
        """Replaces RewardClient."""

        token_ids = False

        def __init__(self, value: float) -> None:
            self.value = value

        async def score(self, item: ScoreItem) -> Score:
            """Return the same reward for all samples."""
            return Score(item.sample, self.value)

    clients = {reward.name: Constant(i + 1) for i, reward in enumerate(job.spec.rewards)}
    item = ScoreItem("s", "sums", "?", "4", "stop", {"question": "?", "answer": "4", "judged": "far"})
    return asyncio.run(scorer_of(job.spec.tasks[0], clients).score(item))


def not_scored(job: RLJob, storage: Path) -> Any:
    """Return the score of a sample that the first reward's service refuses."""
    refused = mock.AsyncMock(side_effect=RefusedSampleError("no"))

    async def score() -> Score:
        client = RewardClient(job.spec.rewards[0], "http://127.0.0.1:1", mock.Mock())
        return await client.score(ScoreItem("s", "sums", "?", "4", "stop", {}))

    with mock.patch.object(RewardHttp, "post", refused):
        return asyncio.run(score())


def sent_token_ids(job: RLJob, storage: Path) -> Any:
    """Return the token ids that the service of the first reward gets for a sample that has some."""
    posted = mock.AsyncMock(side_effect=RefusedSampleError("no"))

    async def score() -> None:
        client = RewardClient(job.spec.rewards[0], "http://127.0.0.1:1", mock.Mock())
        await client.score(ScoreItem("s", "sums", "?", "4", "stop", {}, response_token_ids=[19]))

    with mock.patch.object(RewardHttp, "post", posted):
        asyncio.run(score())
    return json.loads(posted.await_args.args[1])["items"][0]["response_token_ids"]


class _Address:
    """Replaces RewardClient: holds only the address."""

    def __init__(self, reward: Any, url: str, session: Any, token: str) -> None:
        self.url = url

    async def wait_until_reachable(self) -> None:
        """Return at once: there is no service."""

    async def close(self) -> None:
        """Nothing is open."""


def _serve_with(job: RLJob, storage: Path, driver: type) -> None:
    prepared = prepare(environment(job, storage), find_readers(job))
    rewards, environments = (
        {entry.name: f"http://{entry.name}" for entry in entries}
        for entries in (job.spec.rewards, job.spec.environments)
    )
    with (
        mock.patch.object(app, "RunnerDriver", driver),
        mock.patch.object(app, "RewardClient", _Address),
        mock.patch.object(app, "EnvironmentClient", _Address),
    ):
        asyncio.run(app.serve(prepared, rewards, environment_urls=environments))


def acting(job: RLJob, storage: Path) -> Any:
    """Return the environment of the first task: its address, its limits, and the text of a later observation."""
    found: list[Any] = []

    class Driver:
        def __init__(self, url: str, token: str, runtimes: Any, *rest: Any, **others: Any) -> None:
            runtime = next(iter(runtimes.values())).environment
            found.append((runtime.client.url, runtime.limits, runtime.conversation.text({"seed": 1}, "seen")))

        async def run(self) -> None:
            """Exit at once."""
            raise asyncio.CancelledError

        def close(self) -> None:
            """Nothing is open."""

    _serve_with(job, storage, Driver)
    return found


# --- environments -----------------------------------------------------------------------------------------------------


def observed(job: RLJob, storage: Path) -> Any:
    """Return the first observation of the first environment."""
    factory = environment_service.make_factory(job.spec.environments[0], "spec.environments[0]")
    return asyncio.run(_first_observation(factory))


async def _first_observation(factory: Any) -> str:
    return (await Episode(factory, Calls("lake", 10.0)).reset(1, {"seed": 4})).observation


def episodes(job: RLJob, storage: Path) -> Any:
    """Return the limits of the first environment's service."""
    with (
        mock.patch.object(environment_service, "SessionTable") as table,
        mock.patch.object(environment_service, "Calls") as calls,
        mock.patch.object(environment_service, "ServiceServer"),
    ):
        environment_service.run(dict, job.spec.environments[0], "127.0.0.1:1", "")
    return calls.call_args.args, table.call_args.args[2:]


def group_filters(job: RLJob, storage: Path) -> Any:
    """Return the user-written group filter of each task that has one."""
    found: list[Any] = []

    class Driver:
        def __init__(
            self,
            name: str,
            connect: Any,
            runtimes: Any,
            prompts: Any,
            codec: Any,
            rows: Any,
            filters: Any,
            **others: Any,
        ) -> None:
            found.extend((task, each._function, each._limit) for task, each in filters.items())

        async def run(self) -> None:
            """Exit at once."""
            raise asyncio.CancelledError

        def close(self) -> None:
            """Nothing is open."""

    _serve_with(job, storage, Driver)
    return found


def loops(job: RLJob, storage: Path) -> Any:
    """Return the loop of each task."""
    found: list[Any] = []

    class Driver:
        def __init__(self, url: str, token: str, runtimes: Any, *rest: Any, **others: Any) -> None:
            found.extend((name, runtime.loop) for name, runtime in runtimes.items())

        async def run(self) -> None:
            """Exit at once."""
            raise asyncio.CancelledError

        def close(self) -> None:
            """Nothing is open."""

    _serve_with(job, storage, Driver)
    return found


def programs(job: RLJob, storage: Path) -> Any:
    """Return the agent program of each task that has one."""
    return {
        task: getattr(program, "words", None) or program.function.__name__
        for task, program in prepare(environment(job, storage), find_readers(job)).agents.items()
    }


# --- rewards ----------------------------------------------------------------------------------------------------------


def served(job: RLJob, storage: Path) -> Any:
    """Return the number of workers of the first reward's service, and their time-out."""
    with (
        mock.patch.object(sdk, "Pool") as pool,
        mock.patch.object(sdk, "RewardServer"),
        mock.patch.object(sdk, "build_app"),
    ):
        sdk.run(RewardEvaluator(lambda: 0.0, ""), job.spec.rewards[0], "127.0.0.1:1", "")
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
    """Return weights, also of a critic, and microbatches after two steps on made-up samples."""
    world = join_world()
    make_deterministic(world.device)
    try:
        spec = job.spec
        factory = load(BACKENDS, spec.trainer.backend, "spec.trainer.backend")
        place = environment(job, storage)
        policy = place.path(spec.models[0].source)
        backend: Backend = factory(policy, spec.trainer, world)
        sources = read_sources(place)
        frozen = load_models(spec.algorithm, sources, policy, backend)
        critic = load_critic(spec.algorithm, spec.trainer, sources, policy, backend, None)
        microbatches = []
        for step in range(2):
            train, rows = _batch(step, [task.name for task in spec.tasks])
            budget = spec.trainer.microbatch_tokens
            packed = isinstance(backend, PacksRows) and backend.packs
            plan = plan_step(train, spec.algorithm, world, budget, packed)
            microbatches.append(plan.microbatches)
            apply_batch(plan, rows, spec.algorithm, backend, world, StepChecks.of(spec), frozen, critic)
        weights = [(name, tensor.clone()) for name, tensor in backend.named_tensors()]
        of_critic = critic.save().items() if critic is not None else ()
        weights += [(name, tensor) for name, tensor in of_critic if tensor.is_floating_point()]  # no count of updates
        return pack(weights, 1).digest(), microbatches
    finally:
        leave_world()
        torch.use_deterministic_algorithms(False)


def skipped(job: RLJob, storage: Path) -> list[int]:
    """Return after how many skipped updates of each optimizer the run ends."""
    checks, found = StepChecks.of(job.spec), []
    for optimizer in ("optimizer", "criticOptimizer") if job.spec.trainer.critic_optimizer else ("optimizer",):
        for number in itertools.count(1):
            try:
                checks.count_update(OptimizerUpdate(float("inf"), 1.0, skipped=True), 0, 0, optimizer)
            except UnrecoverableError:
                found.append(number)
                break
    return found


def adapted(job: RLJob, storage: Path) -> Any:
    """Return the coefficient of KL after a step."""
    history = EarlierStepsHistory(job.spec.algorithm)
    history.add(0, {"samples": 1.0, "reward/mean": 0.0, "reward/std": 0.0, MEASURED_KL: 0.6})
    return history.before(1).kl_coefficient


def misfits(job: RLJob, storage: Path) -> list[str]:
    """Return the reasons why the Megatron backend refuses the layout for the model."""
    return list(supported_layouts.problems(environment(job, storage).path(job.spec.models[0].source), job.spec.trainer))


def parted(job: RLJob, storage: Path) -> str:
    """Return why the Megatron backend cannot divide samples among one process."""
    world = join_world()
    try:
        make_grid(world, job.spec.trainer.parallelism)
    except ModelError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
        leave_world()
    return ""


def planned(job: RLJob, storage: Path) -> list[str]:
    """Return the memory plan of the trainer on a GPU."""
    model = ModelShape(32_000, 1024, 4096, 16, 16, 4, 64)
    return describe_plan(job.spec, {"policy": model}, 80 << 30)


def saved_for_backward(job: RLJob, storage: Path) -> int:
    """Return the number of tensors that the forward passes of two steps save for the backward pass."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trained(job, storage)
    return len(saved)


def _batch(step: int, tasks: Sequence[str]) -> tuple[Train, dict[int, Row]]:
    """Return a batch of random sequences whose engine log-probabilities are noise, and its rows."""
    generator = np.random.default_rng(step)
    samples, rows = [], {}
    for i in range(12):
        prompt, response = 3, int(generator.integers(2, 12))
        ids = generator.integers(0, 200, prompt + response)
        mask = np.arange(len(ids)) >= prompt
        logprobs = np.where(mask, -5.0 + 0.6 * generator.standard_normal(len(ids)), 0).astype(np.float32)
        samples.append(
            BatchSample(
                sample=f"{i // 3}.{i % 3}",
                group=str(i // 3),
                reward=float((i * 7 + i // 5) % 3),
                prompt_tokens=prompt,
                response_tokens=response,
                total_tokens=prompt + response,
                min_version=step - 1,  # the log-probabilities are not those of the trainer's weights
                temperature=1.0,
                max_tokens=16,
                turn_rewards=[float((i * 7 + i // 5) % 3)],
                turn_states=[str(i % 2)],
                truncated=i % 3 == 0,
                task=tasks[i // 3 % len(tasks)],
            )
        )
        rewards = np.zeros(len(ids))
        rewards[-1] = samples[-1].reward
        of_model = np.where(mask, -4.0, 0).astype(np.float32)
        rows[i] = Row(ids, logprobs, mask, rewards, models={"reference": of_model, "teachers[0]": of_model})
    return Train(incarnation=1, step=step, samples=samples, check_initial_logprobs=False), rows


def published(job: RLJob, storage: Path) -> Any:
    """Return how the trainer sends weights."""
    loop = object.__new__(TrainerLoop)
    loop._job, loop._environment = job, environment(job, storage)
    loop._world = mock.Mock(device=torch.device("cpu"))
    with mock.patch("rljob.trainer.loop.WeightSender") as sender:
        publisher = loop._make_publisher()
    return sender.call_args.args, publisher._transport
