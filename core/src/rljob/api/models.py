"""The manifest: RLJob as pydantic models.

Field names are camelCase in a manifest and snake_case here. Unknown fields are refused with their path. A field
that a preset or another field governs is nullable here and filled by :func:`rljob.api.resolve.resolve` only, so that
a person's own value can always be told from an expanded one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rljob.api.algorithm import Algorithm
from rljob.api.base import Label, Labels, Model, Name, Text
from rljob.api.kubernetes import Network, Storage
from rljob.api.pods import PodTemplate
from rljob.api.roles import Coordinator, Environment, Reward, Rollout, Runner, Trainer
from rljob.api.run_policy import Checkpoints, FailurePolicy, Scheduling, Tracking, WeightSync
from rljob.api.tasks import Evaluation, Task
from rljob.api.unsupported import unsupported
from rljob.api.validation import problems

API_VERSION: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"


class Metadata(Model):
    """Identity of the job."""

    name: Name
    """Name of the job; the default run directory is runs/NAME."""
    namespace: Name | None = None
    """Namespace of the job; kubectl's own when left out."""
    labels: Labels = {}
    """Labels of the job, for whoever looks for it."""
    annotations: Annotated[dict[Label, Annotated[str, Field(max_length=262_144)]], Field(max_length=64)] = {}
    """Notes on the job, for whoever reads it."""


class Initializer(Model):
    """A step run once into the job's storage before any other part starts, cached by its content."""

    command: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Command and arguments. `job://PATH` in an argument becomes a path in the job's storage. It sees RLJOB_JOB
    (path of the resolved manifest), RLJOB_STORAGE and RLJOB_SEED."""
    template: PodTemplate | None = None
    """Kubernetes' PodTemplateSpec, merged over the pod that rljob makes. Image, pull secrets and variables that the
    trainer's template names hold here too; what is said here wins."""


class ModelSource(Model):
    """A model the job uses."""

    name: Name
    """Name that rollouts refer to; the trained model is called `policy`."""
    source: Annotated[Text, Field(min_length=1)]
    """Hugging Face directory: `job://PATH` in the job's storage, or a path (for `rljob run` only)."""
    adapter: Annotated[Text, Field(min_length=1)] | None = None
    """Directory of a low-rank adapter on top of the source, written as `source` is."""
    placement: Literal["trainer", "service"] | None = None
    """Where a model that is not trained computes: in the trainer's processes, or as a pool of engines."""


class Training(Model):
    """Size and length of training."""

    steps: Annotated[int, Field(ge=0, le=10_000_000)]
    """Optimizer steps (batches) to train; each makes one new policy version. 0 only evaluates the model."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Groups in a batch."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """Samples of a group."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """α: trainer version at consumption minus the lowest policy version of any token of a sample is at most this.
    0 is synchronous reinforcement learning."""


class RLJobSpec(Model):
    """What the job is."""

    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    """Seed of data, sampling and initializer."""
    storage: Storage = Storage()
    """The job's storage."""
    initializer: Initializer | None = None
    """Run once before the other parts."""
    models: Annotated[list[ModelSource], Field(min_length=1, max_length=64)]
    """The models; one is called `policy`."""
    training: Training
    """Size and length of training."""
    scheduling: Scheduling = Scheduling()
    """How samples are scheduled."""
    algorithm: Algorithm = Algorithm()
    """The learning algorithm."""
    tasks: Annotated[list[Task], Field(min_length=1, max_length=64)]
    """What is trained on."""
    evaluation: Evaluation | None = None
    """Evaluation on held-out problems; none when left out."""
    rewards: Annotated[list[Reward], Field(min_length=1, max_length=64)]
    """Reward services."""
    environments: Annotated[list[Environment], Field(max_length=64)] = []
    """Environment services, in which trajectories of several turns take place."""
    trainer: Trainer = Trainer()
    """The trainer."""
    rollouts: Annotated[list[Rollout], Field(min_length=1, max_length=64)]
    """Pools of inference engines."""
    runner: Runner = Runner()
    """What drives trajectories."""
    coordinator: Coordinator = Coordinator()
    """What holds the run together."""
    weight_sync: WeightSync = WeightSync()
    """How new weights reach the engines."""
    checkpoints: Checkpoints = Checkpoints()
    """Checkpoints of the trainer."""
    tracking: Tracking = Tracking()
    """Where the figures of the run go, besides metrics.jsonl."""
    network: Network = Network()
    """Who may talk to the job's pods."""
    suspend: bool = False
    """Stop the run in good order, keeping all of it, and start none of its parts until this is false again."""
    suspend_grace_seconds: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """A run that is told to stop writes a checkpoint first, and is ended without one after so long."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What is done about parts that die."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """The run fails when it has run for so long."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The job is deleted so long after its end; never when left out."""
    keep_coordinator_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] = 3600
    """How long after the run's end its status, samples and metrics are served."""
    managed_by: Annotated[Text, Field(min_length=1)] | None = None
    """Name of another controller that is to look after the job instead of rljob's operator."""

    @model_validator(mode="after")
    def _check_references(self) -> RLJobSpec:
        found = [*unsupported(self), *problems(self)]
        if found:
            raise ValueError("\n".join(found))
        return self


class RLJob(Model):
    """Reinforcement-learning post-training of a language model."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    """Version of the manifest's schema."""
    kind: Literal["RLJob"] = "RLJob"
    """Always RLJob."""
    metadata: Metadata
    """Identity of the job."""
    spec: RLJobSpec
    """What the job is."""
