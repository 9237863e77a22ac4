"""The manifest: RLJob as pydantic models.

Field names are camelCase in a manifest and snake_case here. Unknown fields are refused with their path. A field
that a preset or another field governs is nullable here. Only :func:`rljob.api.resolve.resolve` fills it, so that a
user's value can always be distinguished from an expanded value.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import ZERO_FOR_ONE_SAMPLE
from rljob.api.base import Label, Labels, Model, Name, Text
from rljob.api.field_metadata import FieldMeta
from rljob.api.kubernetes import NO_POLICIES, Downloads, Network, Storage
from rljob.api.pod_models import PodTemplate
from rljob.api.roles import Coordinator, Environment, Reward, Rollout, Runner, Trainer
from rljob.api.run_policy import Checkpoints, FailurePolicy, Scheduling, Tracking, WeightSync
from rljob.api.tasks import Evaluation, Task
from rljob.api.unsupported import unsupported
from rljob.api.validation import problems

API_VERSION: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"
OPERATOR = "rljob.dev/operator"
"""Name of rljob's operator in `managedBy`."""
NO_CLUSTER = "there is no cluster"
KEPT = "the run directory is kept, and the coordinator ends with the run"


class Metadata(Model):
    """Identity of the job."""

    name: Name
    """Name of the job. The default run directory is runs/NAME."""
    namespace: Annotated[Name | None, FieldMeta(reader="objects", mutable="never", local=NO_CLUSTER)] = None
    """Namespace of the job. Default: kubectl's current namespace."""
    labels: Annotated[Labels, FieldMeta(reader="objects", local=NO_CLUSTER)] = {}
    """Labels of the RLJob."""
    annotations: Annotated[
        dict[Label, Annotated[str, Field(max_length=262_144)]],
        Field(max_length=64),
        FieldMeta(reader="objects", local=NO_CLUSTER),
    ] = {}
    """Annotations of the RLJob."""


class Initializer(Model):
    """A command that writes to the job's storage. It runs once, before any other role starts. Its result is cached by
    the inputs."""

    command: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Command and arguments. `job://PATH` in an argument becomes a path in the job's storage. Its environment
    has RLJOB_JOB (path of the resolved manifest), RLJOB_STORAGE and RLJOB_SEED."""
    template: PodTemplate | None = None
    """Kubernetes PodTemplateSpec, merged over the pod that rljob creates. Image, pull secrets and variables of the
    trainer's template apply too; this template wins."""


class ModelSource(Model):
    """A model that the job uses."""

    name: Name
    """Name that `rollouts` and `algorithm` refer to. The trained model has the name `policy`; every other model is
    named in `algorithm.referenceModel`, `algorithm.teachers[].model`, `algorithm.criticModel` or `rollouts[].model`."""
    source: Annotated[Text, Field(min_length=1)]
    """Hugging Face directory: `job://PATH` in the job's storage, a path (for `rljob run` only), or a model that is
    downloaded: `hf://ORG/NAME@REVISION` (a branch, tag or commit; default `main`) or `s3://BUCKET/PREFIX`."""
    placement: Annotated[Literal["trainer", "service"] | None, FieldMeta(unsupported=True)] = None
    """Where a model that is not trained runs: in the trainer's processes, or as a pool of engines."""


def _samples_per_prompt() -> str:
    """Return the description of samplesPerPrompt: it lists the advantages that refuse groups of one sample."""
    *names, last = (f"`{name}`" for name in ZERO_FOR_ONE_SAMPLE)
    return (
        "Samples per prompt (group size). With 1, the advantage `group_normalized` (GRPO) is the reward itself, "
        f"without a baseline; {', '.join(names)} and {last} would always be 0 and are refused."
    )


class Training(Model):
    """Size and length of training."""

    steps: Annotated[int, Field(ge=0, le=10_000_000), FieldMeta(reader="coordinator", mutable="raise")]
    """Optimizer steps (batches) to train; each produces one new policy version. 0: evaluate only."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Prompts (groups) per batch."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024, description=_samples_per_prompt())] = 8
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """α: trainer version at consumption minus the lowest policy version of any token of a sample is at most this.
    0: synchronous training."""


class LogprobTolerance(NamedTuple):
    """Bounds of |trainer − engine| in nats, with the fields that set them."""

    mean: float
    largest: float
    mean_field: str
    largest_field: str


class RLJobSpec(Model):
    """Specification of the job."""

    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    """Random seed of data, sampling and initializer."""
    storage: Annotated[
        Storage, FieldMeta(reader="objects", mutable="never", local="the run directory is the storage")
    ] = Storage()
    """The job's storage."""
    initializer: Initializer | None = None
    """Command that runs once before the other roles start."""
    models: Annotated[list[ModelSource], Field(min_length=1, max_length=64)]
    """The models. The one with the name `policy` is trained."""
    downloads: Annotated[Downloads, FieldMeta(reader="pods")] = Downloads()
    """Download of models from the Hugging Face Hub or S3."""
    training: Training
    """Size and length of training."""
    scheduling: Scheduling = Scheduling()
    """Scheduling of samples and pods."""
    algorithm: Algorithm = Algorithm()
    """The learning algorithm."""
    tasks: Annotated[list[Task], Field(min_length=1, max_length=64)]
    """Tasks to train on."""
    evaluation: Evaluation | None = None
    """Evaluation on held-out problems. Default: none."""
    rewards: Annotated[list[Reward], Field(max_length=64)] = []
    """Reward services. A job whose tasks all have environments needs none."""
    environments: Annotated[list[Environment], Field(max_length=64)] = []
    """Environment services for multi-turn trajectories."""
    trainer: Trainer = Trainer()
    """The trainer."""
    rollouts: Annotated[list[Rollout], Field(min_length=1, max_length=64)]
    """Pools of inference engines."""
    runner: Runner = Runner()
    """The runner, which drives trajectories."""
    coordinator: Coordinator = Coordinator()
    """The coordinator."""
    weight_sync: WeightSync = WeightSync()
    """Transfer of new weights to the engines."""
    checkpoints: Annotated[Checkpoints, FieldMeta(reader="coordinator")] = Checkpoints()
    """Checkpoints of the trainer."""
    tracking: Annotated[Tracking, FieldMeta(reader="coordinator")] = Tracking()
    """Where metrics are written, besides metrics.jsonl."""
    network: Annotated[Network, FieldMeta(reader="objects", local=NO_POLICIES)] = Network()
    """NetworkPolicies of the job."""
    suspend: Annotated[bool, FieldMeta(reader="operator")] = False
    """Stop the run gracefully and keep its state. No pods or processes run until this field is false again."""
    suspend_grace_seconds: Annotated[float, Field(ge=0, le=86_400), FieldMeta(reader="operator")] = 120.0
    """Time limit for the checkpoint that a suspended run writes before it stops."""
    failure_policy: Annotated[FailurePolicy, FieldMeta(reader="operator")] = FailurePolicy()
    """Reaction to processes and pods that fail."""
    active_deadline_seconds: Annotated[
        Annotated[int, Field(ge=1, le=2**31 - 1)] | None, FieldMeta(reader="operator")
    ] = None
    """The run fails after running for this long. Default: no limit."""
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1)] | None, FieldMeta(reader="operator", local=KEPT)
    ] = None
    """The RLJob is deleted this long after its end. Default: never."""
    keep_coordinator_seconds: Annotated[int, Field(ge=0, le=2**31 - 1), FieldMeta(reader="operator", local=KEPT)] = 3600
    """How long the coordinator serves status, samples and metrics after the end of the run."""
    managed_by: Annotated[
        Annotated[Text, Field(min_length=1)] | None,
        FieldMeta(reader="operator", mutable="never", local="there is no operator"),
    ] = None
    """Name of the controller that manages the job. Default: rljob's operator, whose name is `rljob.dev/operator`."""

    @property
    def managed_elsewhere(self) -> bool:
        """Whether another controller than rljob's operator manages the job."""
        return self.managed_by not in (None, OPERATOR)

    @property
    def services(self) -> dict[str, Reward | Environment]:
        """Field below spec → each service that the runner calls: rewards[0], environments[0]."""
        rewards = {f"rewards[{i}]": reward for i, reward in enumerate(self.rewards)}
        return rewards | {f"environments[{i}]": environment for i, environment in enumerate(self.environments)}

    @property
    def policy_pools(self) -> list[Rollout]:
        """Pools whose engines sample from the policy."""
        return [pool for pool in self.rollouts if not pool.frozen]

    @property
    def frozen_pools(self) -> list[Rollout]:
        """Pools that serve a model which is not trained, to rewards and loops."""
        return [pool for pool in self.rollouts if pool.frozen]

    @property
    def uses_bfloat16(self) -> bool:
        """Whether the trainer or an engine of the policy computes in bfloat16."""
        return "bfloat16" in (self.trainer.dtype, *(pool.dtype for pool in self.policy_pools))

    @property
    def logprob_tolerance(self) -> LogprobTolerance:
        """How much the log-probabilities of engines may differ from the trainer's."""
        sync = self.weight_sync
        if self.uses_bfloat16:
            field = "spec.weightSync.bfloat16Tolerance"
            return LogprobTolerance(
                sync.bfloat16_tolerance.mean, sync.bfloat16_tolerance.max, f"{field}.mean", f"{field}.max"
            )
        field = "spec.weightSync.probeTolerance"
        return LogprobTolerance(sync.probe_tolerance, sync.probe_tolerance, field, field)

    @model_validator(mode="after")
    def _check_references(self) -> RLJobSpec:
        found = [*unsupported(self), *problems(self)]
        if found:
            raise ValueError("\n".join(found))
        return self


class RLJob(Model):
    """Reinforcement-learning post-training of a language model."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    """Version of the manifest schema."""
    kind: Literal["RLJob"] = "RLJob"
    """Always RLJob."""
    metadata: Metadata
    """Identity of the job."""
    spec: RLJobSpec
    """Specification of the job."""
