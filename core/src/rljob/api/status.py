"""What the cluster knows of a job: `status` of an RLJob. The operator writes all of it but `run`, which is the
coordinator's. No part of rljob reads its own decisions from anywhere else after a restart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import Model, Name, Text

Time = Annotated[str, Field(max_length=63, json_schema_extra={"format": "date-time"})]
"""An instant: 2026-01-31T12:00:00Z."""
Count = Annotated[int, Field(ge=0)]


class Condition(Model):
    """A condition in Kubernetes' manner (metav1.Condition)."""

    type: Literal["Ready", "Initialized", "Suspended", "Complete", "Failed"]
    """What is said to be so or not."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: Annotated[str, Field(max_length=63)]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, in a sentence that says what to do where something can be done."""
    last_transition_time: Time
    """When `status` changed last."""
    observed_generation: Count = 0
    """The spec this was said of."""


class RoleStatus(Model):
    """One role of the job: coordinator, trainer, runner, rollout-POOL, reward-NAME."""

    name: Name
    """Name of the role."""
    desired: Count
    """Pods there shall be."""
    ready: Count
    """Pods that are ready."""
    summary: Text = ""
    """What keeps the rest: "2 of 4 rollout pods pending: insufficient nvidia.com/gpu"; empty when all are ready."""
    restarts: Count = 0
    """Deaths since the job began."""
    counted: Count = 0
    """Container restarts of the pods there are now that are in `restarts` already."""
    last_exit: Text = ""
    """How a container of the role ended last."""


class ReadyCounts(Model):
    """Ready of desired pods, for the columns of `kubectl get`."""

    trainer: Annotated[str, Field(max_length=63)] = ""
    """Such as 2/2."""
    rollout: Annotated[str, Field(max_length=63)] = ""
    """All pools together."""
    reward: Annotated[str, Field(max_length=63)] = ""
    """All services together."""
    restarts: Annotated[str, Field(max_length=253)] = ""
    """Roles that died, and how often: trainer 2, rollout-main 1; empty when none did."""


class Attempt(Model):
    """The trainer's Job there shall be. Recorded before that Job is made, so that no operator makes one twice."""

    number: Count = 1
    """Of NAME-trainer-NUMBER."""
    started_at: Time
    """When it was decided on."""
    not_before: Time | None = None
    """Its back-off ends then."""
    charged: Annotated[float, Field(ge=0)] = 0
    """Deaths that count against failurePolicy.maxRestarts, less those that long lives have forgiven."""
    role_hash: Annotated[str, Field(max_length=63)] = ""
    """Hash of the inputs it was decided for."""
    job_uid: Annotated[str, Field(max_length=63)] = ""
    """Of its Job, once that was seen: one that is gone then was deleted by somebody."""
    cause: Text = ""
    """Why the one before ended; empty for the first, and after a suspension."""


class RunProgress(Model):
    """How far the run is."""

    step: Count = 0
    """Batches applied."""
    steps: Count = 0
    """training.steps."""
    text: Annotated[str, Field(max_length=63)] = ""
    """For the column: 12/50 24%."""
    seconds: Annotated[float, Field(ge=0)] = 0
    """Wall clock that the run has been up."""
    eta_seconds: float = -1
    """Wall clock left; -1: not known, or it does not go on."""


class RunPolicy(Model):
    """The newest published weights."""

    version: int = -1
    """-1: none yet."""
    lineage: int = -1
    """Counts trainers that could not repeat what their predecessor published."""
    digest: Annotated[str, Field(max_length=128)] = ""
    """blake3 over the weights' bytes in wire order."""


class RunCheckpoint(Model):
    """The newest durable checkpoint."""

    step: int = -1
    """-1: none yet."""
    path: Text = ""
    """In the job's storage."""


class RunQueue(Model):
    """How many samples or groups are somewhere."""

    name: Annotated[str, Field(max_length=63)]
    """Where."""
    value: Count
    """How many."""


class RunMetric(Model):
    """A figure of now."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the figure."""
    value: float
    """Its value."""


class RunEngine(Model):
    """An engine that is connected to the coordinator."""

    name: Annotated[str, Field(max_length=253)]
    """Its instance: in a cluster the name of its pod."""
    load: Count = 0
    """Requests it has."""
    drained: bool = False
    """It was asked to be drained (`status.draining`) and has nothing left to do."""


class RunEvaluation(Model):
    """One task on held-out problems at one version of the policy."""

    version: Count
    """Of the policy; 0 is before training."""
    task: Text
    """Its name."""
    accuracy: float
    """Share of problems with a reward of 1 or more."""
    problems: Count
    """How many there were."""
    mean_reward: float
    """Mean over the problems."""
    failed: Count = 0
    """Of the problems: not scored, counted as reward 0."""


class Run(Model):
    """The run as its coordinator tells it. Written by the coordinator alone."""

    state: Literal["Starting", "Running", "Evaluating", "Finishing", "Succeeded", "Suspended", "Failed"]
    """Where the run is; the last three are for good, until it is resumed."""
    reason: Annotated[str, Field(max_length=63)] = ""
    """One CamelCase word, when Failed."""
    message: Text = ""
    """A sentence."""
    incarnation: Count = 0
    """Of the trainer."""
    progress: RunProgress = RunProgress()
    """How far it is."""
    policy: RunPolicy = RunPolicy()
    """The newest weights."""
    last_checkpoint: RunCheckpoint = RunCheckpoint()
    """The newest checkpoint."""
    staleness: Annotated[str, Field(max_length=63)] = ""
    """Mean and most of the last batch, for the column: 0.8/1."""
    queues: Annotated[list[RunQueue], Field(max_length=64)] = []
    """Samples and groups by where they are."""
    metrics: Annotated[list[RunMetric], Field(max_length=64)] = []
    """Figures of now."""
    engines: Annotated[list[RunEngine], Field(max_length=1024)] = []
    """Engines that are connected."""
    evaluations: Annotated[list[RunEvaluation], Field(max_length=64)] = []
    """Results on held-out problems: the first and the newest."""
    observed_generation: Count = 0
    """The spec that the coordinator has acted on last (suspend)."""


class RLJobStatus(Model):
    """Status of an RLJob."""

    observed_generation: Count = 0
    """The spec that the operator has acted on last."""
    release: Annotated[str, Field(max_length=63)] = ""
    """Version of rljob whose operator wrote this last."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready, Initialized, Suspended, Complete, Failed."""
    roles: Annotated[list[RoleStatus], Field(max_length=256)] = []
    """Every role."""
    ready: ReadyCounts = ReadyCounts()
    """Ready pods by kind of role."""
    start_time: Time | None = None
    """When the job's parts were first made; anew when it is resumed (activeDeadlineSeconds counts from it)."""
    completion_time: Time | None = None
    """When the run succeeded or failed."""
    suspended_at: Time | None = None
    """When suspension was asked for."""
    pending_since: Time | None = None
    """Since when pods of the gang wait for a node."""
    trainer: Attempt | None = None
    """The trainer's attempt."""
    draining: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=1024)] = []
    """Pods of engines that are to finish what they have and get nothing new, as they are about to be removed."""
    draining_since: Time | None = None
    """When the last of them was asked."""
    run: Run | None = None
    """What the coordinator says."""
