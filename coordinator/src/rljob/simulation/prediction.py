"""Predicts step time and utilisation of a job for each split of its devices between training and rollout."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterator, Sequence

from rljob.api.backend_checks import backend_problems
from rljob.api.models import RLJob
from rljob.api.roles import Rollout
from rljob.api.speeds import Speeds
from rljob.api.tasks import Task, TaskGroupFilter
from rljob.coordinator.sample_outcomes import MAX_REJECTED_BATCHES
from rljob.protocol.agent_protocol import Generate
from rljob.protocol.simulation_messages import SlowSplit, SplitPrediction
from rljob.protocol.trainer_protocol import Train
from rljob.scheduling.seeds import derive
from rljob.simulation.prediction_notes import is_filtered
from rljob.simulation.simulated_engine import EngineModel, SimulationRecorder
from rljob.simulation.simulated_run import STANDSTILL_SECONDS, Outcome, SimulatedCluster, SimulatedRunError, simulate
from rljob.simulation.virtual_time import StandstillError

MAX_SPLITS = 12
"""Splits that are simulated at first; then those between the neighbours of the best one."""
MOST_ENGINES = 1024
"""Of a split: as many as a pool may have."""
NORMAL = statistics.NormalDist()


def predict(job: RLJob, speeds: Speeds, devices: int, steps: int) -> tuple[list[SplitPrediction], list[SlowSplit]]:
    """Return the predictions of all simulated splits, and the splits that are too slow for one, by number of engines.

    Args:
        job: resolved; see :func:`simulated_job` for the parts that are left out.
        speeds: of engines and trainer.
        devices: GPUs (on CPU: processes) of training and rollout together.
        steps: simulated optimizer steps that count, after :func:`warm_up_steps` others.

    Raises:
        ValueError: the job cannot be simulated, or there is no split, or all are too slow.
    """
    pool = training_pool(job)
    each = pool.parallelism.workers
    largest = (devices - 1) // each
    if largest < 1:
        raise ValueError(
            f"--gpus is {devices}: one engine needs {each} and the trainer at least 1; give at least {each + 1}"
        )
    if largest > MOST_ENGINES:
        raise ValueError(
            f"--gpus is {devices}: with one GPU of the trainer there are {largest} engines, and a pool has at most "
            f"{MOST_ENGINES}; give at most {(MOST_ENGINES + 1) * each}"
        )
    limit = job.spec.weight_sync.timeout_seconds
    if speeds.engine.weight_update_seconds > limit:
        raise ValueError(
            f"engine.weightUpdateSeconds is {speeds.engine.weight_update_seconds:g}: an update fails after "
            f"spec.weightSync.timeoutSeconds {limit:g}; raise that, or lower weightUpdateSeconds"
        )
    possible = [engines for engines in range(1, largest + 1) if _can_train(job, devices - engines * each)]
    if not possible:
        raise ValueError(
            f"--gpus is {devices}: no number of engines leaves a number of GPUs that spec.trainer.parallelism divides; "
            "give another number"
        )
    found: dict[int, SplitPrediction | SlowSplit] = {}
    for i in _spread(0, len(possible) - 1):
        found[possible[i]] = predict_split(job, speeds, possible[i], devices - possible[i] * each, steps)
    best = best_split(list(found.values())).engines
    below = max((n for n in found if n < best), default=best)
    above = min((n for n in found if n > best), default=best)
    for i in _spread(possible.index(below), possible.index(above)):
        if possible[i] not in found:
            found[possible[i]] = predict_split(job, speeds, possible[i], devices - possible[i] * each, steps)
    splits = [found[engines] for engines in sorted(found)]
    return (
        [split for split in splits if isinstance(split, SplitPrediction)],
        [split for split in splits if isinstance(split, SlowSplit)],
    )


def _can_train(job: RLJob, processes: int) -> bool:
    """Return whether the trainer's parallelism divides a number of processes."""
    parallelism = job.spec.trainer.parallelism
    trainer = job.spec.trainer.model_copy(update={"nodes": 1, "processes_per_node": processes})
    return processes % parallelism.replicate == 0 and not any(backend_problems(trainer))


def _spread(first: int, last: int) -> Iterator[int]:
    """Yield at most MAX_SPLITS numbers from ``first`` to ``last``, both included, at equal distances."""
    count = min(MAX_SPLITS, last - first + 1)
    previous = None
    for i in range(count):
        number = first + round(i * (last - first) / max(1, count - 1))
        if number != previous:
            yield number
        previous = number


def best_split(splits: Sequence[SplitPrediction | SlowSplit]) -> SplitPrediction:
    """Return the split with the shortest step; of equal ones that with the fewest engines.

    Raises:
        ValueError: all splits are too slow.
    """
    predictions = [split for split in splits if isinstance(split, SplitPrediction)]
    if not predictions:
        first = splits[0]
        assert isinstance(first, SlowSplit)
        raise ValueError(f"every split is too slow for a prediction; engines: {first.engines}: {first.reason}")
    return min(predictions, key=lambda each: (each.step_seconds, each.engines))


def training_pool(job: RLJob) -> Rollout:
    """Return the pool that generates training samples.

    Raises:
        ValueError: there are several.
    """
    pools = [pool for pool in job.spec.policy_pools if pool.purpose == "training"]
    if len(pools) > 1:
        names = ", ".join(pool.name for pool in pools)
        raise ValueError(f"spec.rollouts: has {len(pools)} training pools ({names}); keep one of them for a simulation")
    return pools[0]


def simulated_job(job: RLJob, steps: int, accepted_groups: float) -> RLJob:
    """Return the job that is simulated: without evaluations, with checkpoints at the end only, and with
    ``accepted_groups``, the part of the groups that the filters accept, in place of their conditions: simulated rewards
    say nothing about real ones."""
    spec = job.spec
    training = spec.training.model_copy(update={"steps": steps})
    checkpoints = spec.checkpoints.model_copy(update={"every_steps": max(1, steps)})
    changes = {
        "training": training,
        "checkpoints": checkpoints,
        "evaluation": None,
        "tasks": [_with_simulated_filter(task, accepted_groups) for task in spec.tasks],
        "rollouts": [training_pool(job)],
    }
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})


def _with_simulated_filter(task: Task, accepted_groups: float) -> Task:
    """Return the task with a filter that accepts groups with reward 1 and rejects those with reward 0, or with none."""
    rejects = is_filtered(task) and accepted_groups < 1
    return task.model_copy(update={"group_filter": TaskGroupFilter(kind="none", min_mean=0.5 if rejects else None)})


def predict_split(
    job: RLJob,
    speeds: Speeds,
    engines: int,
    trainer_devices: int,
    steps: int,
    recorder: SimulationRecorder | None = None,
) -> SplitPrediction | SlowSplit:
    """Simulate one split; arguments as for :func:`predict`.

    Raises:
        ValueError: the job fails in the simulation.
    """
    pool, seed, work = training_pool(job), job.spec.seed, _Answers(job, speeds)
    staleness = job.spec.training.max_staleness
    warm_up = warm_up_steps(staleness)
    model = EngineModel(
        pool.max_concurrency, speeds.engine.tokens_per_second_per_sequence, speeds.engine.tokens_per_second
    )

    async def reward(sample: str) -> float:
        await asyncio.sleep(speeds.reward_seconds)
        group = sample.partition(".")[0]
        return float(_fraction(derive(seed, group, 0, 0)) < speeds.accepted_groups)

    durations: list[float] = []

    def train_seconds(batch: Train) -> float:
        tokens = sum(work.tokens[sample.sample] + speeds.prompt_tokens for sample in batch.samples)
        rate = speeds.trainer.tokens_per_second_per_gpu * trainer_devices
        durations.append(speeds.trainer.seconds_per_step + tokens / rate)
        return durations[-1]

    cluster = SimulatedCluster(
        [(pool.name, model)] * engines,
        work.of,
        train_seconds,
        speeds.engine.weight_update_seconds,
        reward,
        runners=job.spec.runner.replicas.min,
    )
    try:
        simulated = simulated_job(job, warm_up + steps + staleness, speeds.accepted_groups)
        outcome = simulate(simulated, cluster, recorder=recorder)
    except StandstillError:
        return _slow(engines, trainer_devices, speeds, max(durations, default=0.0))
    except SimulatedRunError as error:
        raise _problem(error, speeds) from None
    busy = sum(durations[warm_up : warm_up + steps])
    return _prediction(outcome, warm_up, steps, engines, trainer_devices, speeds, busy)


def _problem(error: SimulatedRunError, speeds: Speeds) -> Exception:
    """Return the error of a run that failed; a defect stays one."""
    if error.reason == "InternalError":
        return error
    if error.reason == "AllGroupsFiltered":
        return ValueError(
            f"acceptedGroups is {speeds.accepted_groups:g}: the run would fail, as no group of {MAX_REJECTED_BATCHES} "
            "batches in a row is accepted; raise it"
        )
    return ValueError(f"the simulated run failed: {error}")


def _slow(engines: int, trainer_devices: int, speeds: Speeds, train_seconds: float) -> SlowSplit:
    """Return why nothing happened for a day; ``train_seconds``: of the longest step that the trainer began."""
    if train_seconds >= STANDSTILL_SECONDS:
        reason = (
            f"the trainer computes a step for {train_seconds / STANDSTILL_SECONDS:.1f} days; give it more GPUs, or "
            "correct trainer.tokensPerSecondPerGpu and secondsPerStep"
        )
        return SlowSplit(engines, trainer_devices, train_seconds, reason)
    reason = (
        "no sample was finished for a day; correct engine.tokensPerSecondPerSequence "
        f"{speeds.engine.tokens_per_second_per_sequence:g}, engine.tokensPerSecond "
        f"{speeds.engine.tokens_per_second:g} or rewardSeconds {speeds.reward_seconds:g}"
    )
    return SlowSplit(engines, trainer_devices, STANDSTILL_SECONDS, reason)


def _prediction(
    outcome: Outcome, warm_up: int, steps: int, engines: int, trainer_devices: int, speeds: Speeds, busy: float
) -> SplitPrediction:
    """Return the prediction from the ``steps`` steps after ``warm_up`` others; ``busy``: training seconds in them."""
    began, ended = outcome.steps[warm_up - 1], outcome.steps[warm_up + steps - 1]
    seconds = ended - began
    tokens = outcome.generated[warm_up + steps - 1] - outcome.generated[warm_up - 1]
    batch = len(outcome.ages) // len(outcome.steps)  # all have the same number of samples
    return SplitPrediction(
        engines=engines,
        trainer_devices=trainer_devices,
        step_seconds=seconds / steps,
        engine_utilisation=tokens / (seconds * engines * speeds.engine.tokens_per_second),
        trainer_utilisation=min(1.0, busy / seconds),
        mean_staleness=statistics.fmean(outcome.ages[warm_up * batch : (warm_up + steps) * batch]),
        tokens_per_second=tokens / seconds,
    )


def warm_up_steps(max_staleness: int) -> int:
    """Return how many first steps do not count: until the batches in flight have their steady number."""
    return max_staleness + 2


class _Answers:
    """Lengths of the answers, drawn from the requests' own seeds. ``tokens``: sample → tokens."""

    def __init__(self, job: RLJob, speeds: Speeds) -> None:
        self._answers = speeds.answers
        self._room = training_pool(job).max_model_length - speeds.prompt_tokens
        if self._room < 1:
            raise ValueError(
                f"promptTokens is {speeds.prompt_tokens}, which leaves no room in maxModelLength "
                f"{training_pool(job).max_model_length}; lower it"
            )
        self.tokens: dict[str, float] = {}

    def of(self, request: Generate) -> float:
        """Return the tokens of an answer: at most its task's maxTokens."""
        limit = float(min(self._room, request.sampling.max_tokens))
        normal = NORMAL.inv_cdf(_fraction(request.sampling.seed))
        tokens = min(limit, max(1.0, self._answers.median_tokens * math.exp(self._answers.sigma * normal)))
        self.tokens[request.request_id.sample] = tokens
        return tokens


def _fraction(seed: int) -> float:
    """Return a seed (< 2**63) as a number in (0, 1)."""
    return (seed + 0.5) / 2**63
