"""`status` of an RLJob: the state of a job in a cluster. The coordinator writes `run`, the operator all other fields.

After a restart the operator reads its own decisions from here only. `RunState` is also the base class of
rljob.protocol.run_status.RunStatus, the status that the coordinator serves. The classes of `run` are dataclasses:
pydantic checks bounds when it reads them, and the coordinator creates them without checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from rljob.api.base import Model, Name, Text
from rljob.api.kubernetes import GangProvider
from rljob.api.tasks import MOST_PASS_AT

Time = Annotated[str, Field(max_length=63, json_schema_extra={"format": "date-time"})]
"""A time stamp: 2026-01-31T12:00:00Z."""
Count = Annotated[int, Field(ge=0)]
METRIC_NAME_LENGTH = 63
LONGEST_REASON = 500
"""Characters of the reason of a failed sample."""
MOST_ENTRIES = {"queues": 64, "metrics": 64, "engines": 1024, "loads": 256}
"""Maximum of some lists of `run`."""
MOST_EVALUATIONS = 64
"""Maximum in `run`, which remains after the coordinator is deleted: half the first, half the newest."""
MOST_WARNINGS = 16
"""Maximum in `run`: the newest."""
State: TypeAlias = Literal["Starting", "Running", "Evaluating", "Finishing", "Succeeded", "Suspended", "Failed"]
"""Starting: no batch can be made yet (engines or trainer missing). Running: between the first batch and the last.
Evaluating: only evaluation is active. Finishing: the last checkpoint and evaluation. The other three are final, and the
coordinator keeps serving them. Suspended: a user requested it, all state is durable, and the run continues when its
processes start again."""


class Condition(Model):
    """A Kubernetes condition (metav1.Condition)."""

    type: Literal["Ready", "Initialized", "Suspended", "Complete", "Failed", "Stalled"]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Annotated[str, Field(max_length=63)]
    """Reason in CamelCase."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Explanation for users, with a remedy if there is one."""
    last_transition_time: Time
    """Time of the last change of `status`."""
    observed_generation: Count = 0
    """Generation of the spec that the condition refers to."""


class RoleStatus(Model):
    """One role of the job: coordinator, trainer, runner, rollout-POOL, reward-NAME, environment-NAME."""

    name: Name
    """Name of the role."""
    desired: Count
    """Desired pods, of a pool engines."""
    ready: Count
    """Ready pods, of a pool engines."""
    summary: Text = ""
    """Why pods are not ready: "2 of 4 rollout pods pending: insufficient nvidia.com/gpu"; empty when all are ready."""
    restarts: Count = 0
    """Container failures since the start of the job."""
    counted: Count = 0
    """Container restarts of the current pods that `restarts` already includes."""
    last_exit: Text = ""
    """How the last terminated container of the role ended."""


class ReadyCounts(Model):
    """Ready/desired pods, for the columns of `kubectl get`."""

    trainer: Annotated[str, Field(max_length=63)] = ""
    """Trainer: 2/2."""
    rollout: Annotated[str, Field(max_length=63)] = ""
    """All pools together: 3/4."""
    reward: Annotated[str, Field(max_length=63)] = ""
    """All reward services together: 1/1."""
    environment: Annotated[str, Field(max_length=63)] = ""
    """All environment services together: 1/1."""
    restarts: Annotated[str, Field(max_length=253)] = ""
    """Failures by role: trainer 2, rollout-main 1; empty when there were none."""


class Attempt(Model):
    """The trainer's current attempt. Recorded before its Job is created, so that no operator creates it twice."""

    number: Count = 1
    """Number of the attempt; its Job is called NAME-trainer-NUMBER."""
    started_at: Time
    """When the attempt was decided."""
    not_before: Time | None = None
    """End of its back-off."""
    charged: Annotated[float, Field(ge=0)] = 0
    """Failures counted against failurePolicy.maxRestarts; time without failures reduces it."""
    role_hash: Annotated[str, Field(max_length=63)] = ""
    """Hash of the inputs that the attempt was decided for."""
    job_uid: Annotated[str, Field(max_length=63)] = ""
    """UID of its Job once observed. If that Job no longer exists, it was deleted from outside."""
    cause: Text = ""
    """Why the previous attempt ended; empty for the first one and after a suspension."""


class StatusPart:
    """Base class of the parts of `run`: camelCase aliases. A reader ignores unknown fields, so it reads the status of a
    newer coordinator."""

    __pydantic_config__ = ConfigDict(alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False)


@dataclass
class Progress(StatusPart):
    """Progress of the run."""

    step: Count = 0
    """Applied batches: the version of the policy."""
    steps: Count = 0
    """training.steps."""
    text: Annotated[str, Field(max_length=63)] = ""
    """Text for the printer column: 12/50 24%."""
    seconds: Annotated[float, Field(ge=0)] = 0
    """Wall-clock seconds that the run has been active, over all starts of the coordinator."""
    eta_seconds: float = -1
    """Estimated wall-clock seconds left; -1: unknown, or the run is not active."""


@dataclass
class PolicyStatus(StatusPart):
    """The newest published policy version."""

    version: int = -1
    """-1: none."""
    lineage: int = -1
    """Incremented when a trainer cannot reproduce the weights that its predecessor published."""
    digest: Annotated[str, Field(max_length=128)] = ""
    """blake3 digest of the weights' bytes in wire order."""


@dataclass
class CheckpointStatus(StatusPart):
    """The newest durable checkpoint."""

    step: int = -1
    """-1: none."""
    path: Text = ""
    """Path in the job's storage, in Hugging Face format."""


@dataclass
class Queue(StatusPart):
    """Number of samples or groups in one state."""

    name: Annotated[str, Field(max_length=63)]
    """State of the samples or groups, for example generating, scoring, ready."""
    value: Count
    """Their number."""


@dataclass
class Metric(StatusPart):
    """Value of a metric: of the last step, or of now (tokens_per_second, seconds_training)."""

    name: Annotated[str, Field(max_length=METRIC_NAME_LENGTH)]
    """Name of the metric, as in metrics.jsonl: reward/mean, staleness/max, trainer/loss."""
    value: float
    """Its value."""


@dataclass
class EngineStatus(StatusPart):
    """An engine connected to the coordinator."""

    name: Annotated[str, Field(max_length=253)]
    """Name of the engine: in a cluster its pod."""
    load: Count = 0
    """Requests in flight."""
    drained: bool = False
    """It is in `status.draining` and has no requests left."""


@dataclass
class RoleLoad(StatusPart):
    """The load of a role that can be scaled."""

    role: Annotated[str, Field(max_length=63)]
    """Name of the role: runner, rollout-POOL, reward-NAME, environment-NAME."""
    load: Annotated[float, Field(ge=0)]
    """Samples that wait for a score of the reward, episodes of the environment, open samples of the runner, engines
    that the pool needs."""


@dataclass
class PassRate(StatusPart):
    """pass@k: the probability that at least one of k answers to a problem passes, as a mean over the problems."""

    k: Annotated[int, Field(ge=1)]
    """Number of answers."""
    value: float
    """The estimate."""


@dataclass
class EvaluationResult(StatusPart):
    """Result of one task on held-out problems with one policy version; the first is before training, the last after."""

    version: Count
    """Policy version; 0 is before training."""
    task: Text
    """Name of the task."""
    accuracy: float
    """Fraction of answers that pass: their reward is at least `evaluation.passReward`."""
    problems: Count
    """Number of problems."""
    mean_reward: float
    """Mean reward over the answers."""
    failed: Count = 0
    """Answers that could not be scored, counted as reward 0. They do not pass."""
    failure: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    """Reason of the last of them."""
    samples_per_problem: Count = 1
    """Answers to each problem."""
    pass_at: Annotated[list[PassRate], Field(max_length=MOST_PASS_AT)] = field(default_factory=list)
    """pass@k for each k of `evaluation.passAt`."""

    @property
    def samples(self) -> int:
        """Number of answers."""
        return self.problems * self.samples_per_problem


@dataclass
class EndedSamples(StatusPart):
    """Training samples that have ended since the start of the run, by their end."""

    trained: Count = 0
    """Samples of applied batches."""
    baseline: Count = 0
    """Greedy answers whose reward is the baseline of their group; they are not trained."""
    filtered: Count = 0
    """Samples of groups that the groupFilter of their task rejected."""
    surplus: Count = 0
    """Redundant samples, and samples that no batch needed."""
    expired: Count = 0
    """Samples of groups that were not complete at their deadline."""
    failed: Count = 0
    """Samples that could not be finished or scored, and the other samples of their groups."""
    last_failure: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    """Reason of the last sample that could not be finished or scored."""


@dataclass
class RunState(StatusPart):
    """State of the run. Written by the coordinator only."""

    state: State
    """State of the run; the last three are final until the run is resumed."""
    reason: Annotated[str, Field(max_length=63)] = ""
    """Reason in CamelCase, when Failed."""
    message: Text = ""
    """Explanation for users."""
    incarnation: Count = 0
    """Incarnation of the trainer."""
    progress: Progress = field(default_factory=Progress)
    """Progress."""
    policy: PolicyStatus = field(default_factory=PolicyStatus)
    """The newest published policy version."""
    last_checkpoint: CheckpointStatus = field(default_factory=CheckpointStatus)
    """The newest durable checkpoint."""
    staleness: Annotated[str, Field(max_length=63)] = ""
    """Mean/maximum staleness of the last batch, for the printer column: 0.8/1."""
    queues: Annotated[list[Queue], Field(max_length=MOST_ENTRIES["queues"])] = field(default_factory=list)
    """Samples and groups by state."""
    ended: EndedSamples = field(default_factory=EndedSamples)
    """Training samples that have ended."""
    metrics: Annotated[list[Metric], Field(max_length=MOST_ENTRIES["metrics"])] = field(default_factory=list)
    """Current metrics."""
    engines: Annotated[list[EngineStatus], Field(max_length=MOST_ENTRIES["engines"])] = field(default_factory=list)
    """Connected engines."""
    loads: Annotated[list[RoleLoad], Field(max_length=MOST_ENTRIES["loads"])] = field(default_factory=list)
    """Load of the roles, for autoscaling."""
    evaluations: Annotated[list[EvaluationResult], Field(max_length=MOST_EVALUATIONS)] = field(default_factory=list)
    """Evaluation results: the first and the newest."""
    warnings: Annotated[list[Text], Field(max_length=MOST_WARNINGS)] = field(default_factory=list)
    """What happened to the policy besides training, oldest first: a checkpoint was refused, a new lineage started."""
    earlier_warnings: Count = 0
    """Number of warnings before those."""
    observed_generation: Count = 0
    """Generation of the spec that the coordinator has acted on (suspend); 0 outside a cluster."""


class RLJobStatus(Model):
    """Status of an RLJob."""

    observed_generation: Count = 0
    """Generation of the spec that the operator has acted on."""
    release: Annotated[str, Field(max_length=63)] = ""
    """Version of the operator that wrote this status last."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready, Initialized, Suspended, Complete, Failed."""
    roles: Annotated[list[RoleStatus], Field(max_length=256)] = []
    """All roles."""
    ready: ReadyCounts = ReadyCounts()
    """Ready/desired pods by kind of role."""
    start_time: Time | None = None
    """When the job's pods were created, first or after a suspension; activeDeadlineSeconds counts from it."""
    completion_time: Time | None = None
    """When the run succeeded or failed."""
    suspended_at: Time | None = None
    """When suspension was requested."""
    pending_since: Time | None = None
    """Since when pods of the gang have been pending."""
    gang_provider: Literal[GangProvider, ""] = ""
    """Gang provider with which the job's pods were created; another setting of the cluster does not change it. Empty if
    the job has no pods."""
    evicted_at: Time | None = None
    """When Kueue took back the admission. The run writes a checkpoint and stops, as with `spec.suspend`."""
    trainer: Attempt | None = None
    """The trainer's attempt."""
    draining: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=1024)] = []
    """Pods of engines that finish their requests and get no new ones, because they will be removed."""
    draining_since: Time | None = None
    """When the last of them was added."""
    run: RunState | None = None
    """State of the run, written by the coordinator."""
