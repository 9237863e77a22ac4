"""The manifest: RLJob as pydantic models.

Field names are camelCase in a manifest and snake_case here. Unknown fields are refused with their path. A field
that a preset or another field governs is nullable here and filled by :func:`rljob.api.resolve.resolve` only, so that
a person's own value can always be told from an expanded one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from rljob.api.references import problems

API_VERSION: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63),
]
"""A name as Kubernetes allows it for a label: lower-case letters, digits and dashes."""

Text = Annotated[str, StringConstraints(max_length=4096)]


class Model(BaseModel):
    """Base of every part of the manifest."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class Metadata(Model):
    """Identity of the job."""

    name: Name
    """Name of the job; the default run directory is runs/NAME."""


class Initializer(Model):
    """A step run once into the job's storage before any other part starts, cached by its content."""

    command: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Command and arguments. `job://PATH` in an argument becomes a path in the job's storage. It sees RLJOB_JOB
    (path of the resolved manifest), RLJOB_STORAGE and RLJOB_SEED."""


class ModelSource(Model):
    """A model the job uses."""

    name: Name
    """Name that rollouts refer to; the trained model is called `policy`."""
    source: Annotated[Text, Field(min_length=1)]
    """Hugging Face directory: `job://PATH` in the job's storage, or a path (for `rljob run` only)."""


class Training(Model):
    """Size and length of training."""

    steps: Annotated[int, Field(ge=1, le=10_000_000)]
    """Optimizer steps (batches) to train; each makes one new policy version."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Groups in a batch."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """Samples of a group."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """α: trainer version at consumption minus the lowest policy version of any token of a sample is at most this.
    0 is synchronous reinforcement learning."""


class Redundancy(Model):
    """Work started beyond what a batch needs, so that a batch need not wait for its slowest part."""

    groups: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups started beyond the admission bound. Those that a batch does not need wait for the next one if their
    deadline allows, else they end as `surplus`: this favours short answers."""
    members: Annotated[int, Field(ge=0, le=1024)] = 0
    """Samples started in each group beyond samplesPerPrompt; the first to be scored form the group."""


class Scheduling(Model):
    """How samples are scheduled."""

    redundancy: Redundancy = Redundancy()
    """Redundant work."""
    on_deadline: Literal["wait", "regenerate"] = "wait"
    """What happens to a group that is not complete when the last batch it may join is due. `wait`: the batch waits
    for it (unbiased). `regenerate`: it ends as `expired` and its prompt starts afresh under current weights."""


class Algorithm(Model):
    """The learning algorithm. A preset fills every field left out; `rljob explain` shows the result."""

    preset: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo` (DeepSeekMath, arXiv 2402.03300) or `dr_grpo` (arXiv 2503.20783)."""
    advantage: Literal["group_normalized", "group_centered"] | None = None
    """`group_normalized`: (R − mean) / (std + 1e-6) over the group, unbiased std. `group_centered`: R − mean."""
    aggregation: Literal["token_mean", "token_sum_constant"] | None = None
    """`token_mean`: sum over the tokens of the global batch divided by their number. `token_sum_constant`: divided
    by samples of the batch times the task's maxTokens instead, so that long answers weigh as they are."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """ε_low: the ratio is clipped below at 1 − ε_low."""
    clip_high: Annotated[float, Field(gt=0, le=10)] | None = None
    """ε_high: the ratio is clipped above at 1 + ε_high."""
    dual_clip: Annotated[float, Field(gt=1, le=100)] | None = None
    """c: for negative advantages the objective is bounded below by c·A. Null: no such bound."""
    ratio: Literal["behavior", "proximal"] | None = None
    """Denominator of the ratio: `behavior` is the engine's log-probability when the token was sampled; `proximal`
    the trainer's at the start of the batch."""
    minibatches: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Optimizer updates per batch; each sees its share of the batch's samples once."""
    group_filter: Literal["none", "nonconstant"] | None = None
    """`nonconstant` rejects and replaces a group whose rewards are all equal (dynamic sampling, arXiv 2503.14476)."""


class ReasoningGym(Model):
    """Problems generated by a reasoning-gym dataset."""

    dataset: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=63)]
    """Name of the dataset, for example chain_sum."""
    config: dict[str, Any] = {}
    """Parameters of the dataset, as reasoning-gym names them. `seed` and `size` are governed by the job."""


class TaskData(Model):
    """Where the prompts of a task come from."""

    reasoning_gym: ReasoningGym
    """Generated problems, endless; a problem belongs to the held-out split by the hash of its question."""


class Sampling(Model):
    """How answers are sampled."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Softmax temperature; the trainer divides by it too."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    """Longest answer in tokens."""


class Task(Model):
    """A kind of prompt with its reward."""

    name: Name
    """Name of the task."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the prompts, relative to the other tasks."""
    data: TaskData
    """Source of prompts."""
    prompt: Text = "{question}\n"
    """Template of the prompt; {question} stands for the problem's text."""
    reward: Name
    """Name of an entry of `rewards`."""
    sampling: Sampling = Sampling()
    """How answers are sampled."""


class Evaluation(Model):
    """Evaluation on held-out problems, at a pinned policy version, on the same engines."""

    every_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Evaluate every so many steps besides before the first and after the last; 0: only then."""
    tasks: Annotated[list[Name], Field(min_length=1, max_length=64)] | None = None
    """Tasks to evaluate; all when left out."""
    problems: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Held-out problems of each task, each answered once."""


class Reward(Model):
    """A reward service."""

    name: Name
    """Name that tasks refer to."""
    builtin: Literal["reasoning_gym"]
    """Scorer that ships with rljob. `reasoning_gym`: the dataset's own verdict on the extracted answer, 0 or 1."""
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    """Worker processes that score samples."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A sample that takes longer to score counts as failed, and its worker is replaced."""


class Optimizer(Model):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Step size, constant after the warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moment."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The global gradient norm is clipped to this."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Steps over which the learning rate rises linearly from 0."""


class Trainer(Model):
    """The trainer."""

    backend: Literal["fsdp"] = "fsdp"
    """`fsdp`: PyTorch FSDP2."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes, one per accelerator, or on CPU one per data-parallel rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters in forward and backward; the optimizer's are float32."""
    microbatch_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 16_384
    """Padded tokens of one forward pass on one rank; a longer single sample still goes alone."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""


class Replicas(Model):
    """How many copies of a part run."""

    min: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies that are started."""


class Rollout(Model):
    """A pool of inference engines."""

    name: Name
    """Name of the pool."""
    model: Name = "policy"
    """Name of an entry of `models`."""
    engine: Literal["vllm"] = "vllm"
    """The inference engine."""
    replicas: Replicas = Replicas()
    """Engines of the pool."""
    max_concurrency: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Requests that run in one engine at a time."""
    max_model_length: Annotated[int, Field(ge=2, le=16_777_216)] = 4096
    """Longest sequence, prompt included, in tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights and cache."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Size of the key-value cache in bytes; the engine decides when left out."""
    args: Annotated[list[Text], Field(max_length=64)] = []
    """More arguments for the engine's server. Arguments that rljob itself sets are refused."""


class WeightSync(Model):
    """How new weights reach the engines."""

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl when trainer and engines have NVIDIA GPUs of their own, else gloo."""
    in_flight: Literal["keep", "keepStaleCache", "abort", "wait"] = "keep"
    """Sequences in flight at an update. `keep`: go on under the new weights, cache recomputed. `keepStaleCache`: go
    on with the old cache. `abort`: interrupted and continued from their prefix. `wait`: the update waits for them."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 16 << 20
    """Size of one broadcast in bytes."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """An update of one engine that takes longer has failed; the engine is given weights anew, or restarted."""
    probe_tolerance: Annotated[float, Field(gt=0, le=10)] = 1e-4
    """Largest difference between trainer and engine in the log-probability of a probe token (float32: the run stops
    when exceeded; bfloat16: a warning)."""


class Checkpoints(Model):
    """Checkpoints of the trainer, in Hugging Face format with the optimizer's state beside it."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 20
    """Steps between checkpoints; there is one after the last step besides."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Checkpoints kept."""


class FailurePolicy(Model):
    """What is done about parts that die."""

    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    """Restarts of one part in a run before the run fails. Ten minutes without a death forgive one."""


class RLJobSpec(Model):
    """What the job is."""

    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    """Seed of data, sampling and initializer."""
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
    trainer: Trainer = Trainer()
    """The trainer."""
    rollouts: Annotated[list[Rollout], Field(min_length=1, max_length=64)]
    """Pools of inference engines."""
    weight_sync: WeightSync = WeightSync()
    """How new weights reach the engines."""
    checkpoints: Checkpoints = Checkpoints()
    """Checkpoints of the trainer."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What is done about parts that die."""

    @model_validator(mode="after")
    def _check_references(self) -> RLJobSpec:
        found = list(problems(self))
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
