"""Roles of a manifest: rewards, environments, trainer, rollout pools, runner, coordinator."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rljob.api.autoscaling import Autoscaling, LoadAutoscaling, Replicas, ServiceReplicas
from rljob.api.base import Collectives, Model, Name, Quantity, Text, Url
from rljob.api.builtin import summaries
from rljob.api.engine_registry import engine_docs
from rljob.api.environments import ENVIRONMENTS, environment_docs, environment_option_docs
from rljob.api.extensions import BACKENDS, BUILTIN_BACKENDS, ENGINES, Extension, Reference
from rljob.api.field_metadata import FieldMeta
from rljob.api.kubernetes import NO_PODS, NO_POLICIES, Accelerator, Egress, Rdma
from rljob.api.pod_models import PodTemplate
from rljob.api.rewards import REWARDS, builtin_docs, option_docs

MEMORY = "processes share the memory of this machine"
NETWORK = "all processes use the network of this machine"
BUILTIN_MEMORY = 1 << 30
ONE_PROCESS = "one process is started; set processes for more workers in it"
ONE_SERVICE = "one process is started"
IN_FLIGHT_PER_PROCESS, EPISODES_PER_POD, SAMPLES_PER_RUNNER = 8, 256, 1024
"""Defaults of `autoscaling.targetInFlight`: of a reward for each of its processes, of an environment, of the runner."""


class LocalCommand(Model):
    """How `rljob run` starts a service of your own."""

    command: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Command and arguments. The program listens at RLJOB_LISTEN (HOST:PORT; in a cluster
    :PORT, which means all addresses)."""


class Reward(Model):
    """A reward service: `builtin`, `function`, `url`, or a container of your own in `template`, with `local` for
    `rljob run`."""

    name: Name
    """Name that tasks refer to."""
    builtin: Annotated[
        Annotated[str, Extension(REWARDS, references=False)] | None, Field(description=builtin_docs())
    ] = None
    function: Reference | None = None
    """Reward of your own package as `module:attribute`: a function or a class as in the reward SDK, or a `RewardKind`
    with options. In a cluster the image in `template` must have the package."""
    config: Annotated[dict[Text, Any], Field(max_length=64, description=option_docs())] = {}
    url: Url | None = None
    """Address of a service outside the job; samples are posted to URL/v1/score."""
    template: PodTemplate | None = None
    """Kubernetes PodTemplateSpec, merged over the pod that rljob creates. For a service of your own: its container,
    named `main`."""
    local: LocalCommand | None = None
    """How `rljob run` starts a service of your own."""
    replicas: Annotated[ServiceReplicas, FieldMeta(local=ONE_PROCESS)] = ServiceReplicas()
    """Pods of the service."""
    autoscaling: LoadAutoscaling = LoadAutoscaling()
    """What changes the number of pods. The load is the number of samples that wait for a score."""
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    """Worker processes per pod that score samples."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Time limit for scoring one sample. After this time the sample counts as failed, and its worker is replaced."""
    memory_bytes: Annotated[int, Field(ge=1 << 24, le=1 << 50)] | None = None
    """Memory that a worker process may allocate beyond what the service has loaded. A sample that needs more counts as
    failed. Default: 1 GiB for a builtin other than `reward_model`, no limit otherwise."""

    egress: Annotated[Egress | None, FieldMeta(reader="objects", local=NO_POLICIES)] = None
    """Outgoing connections of the pods of this reward, besides the job's pods and the cluster's DNS. Default:
    `network.egress`."""
    token_ids: bool = False
    """Whether samples have the token ids of their last answer, `response_token_ids`. They double a request."""
    not_scored_reward: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Reward of a sample that could not be scored, whatever the reason; its metric `not_scored` is 1. Default: such a
    sample ends as failed, and its group is replaced."""

    @property
    def target_in_flight(self) -> int:
        """Samples in flight per pod."""
        return self.autoscaling.target_in_flight or IN_FLIGHT_PER_PROCESS * self.processes

    @property
    def worker_memory(self) -> int | None:
        """Limit of a worker process in bytes; None: none."""
        limited = self.builtin is not None and REWARDS[self.builtin].limits_memory
        return BUILTIN_MEMORY if self.memory_bytes is None and limited else self.memory_bytes

    @property
    def served_by_rljob(self) -> bool:
        """Whether rljob's own service scores: a builtin or a function."""
        return self.builtin is not None or self.function is not None

    @property
    def checked_by_service(self) -> bool:
        """Whether only the service can check the entry: it has the code."""
        return self.function is not None


class Environment(Model):
    """An environment service: `builtin`, `function`, `url`, or a container of your own in `template`, with `local` for
    `rljob run`."""

    name: Name
    """Name that tasks refer to."""
    builtin: Annotated[
        Annotated[str, Extension(ENVIRONMENTS, references=False)] | None, Field(description=environment_docs())
    ] = None
    function: Reference | None = None
    """Environment of your own package as `module:attribute`: a class with `reset(seed, row)` and `step(action)`, or an
    `EnvironmentKind` with options. In a cluster the image in `template` must have the package."""
    config: Annotated[dict[Text, Any], Field(max_length=64, description=environment_option_docs())] = {}
    url: Url | None = None
    """Address of a service outside the job that speaks the session protocol."""
    template: PodTemplate | None = None
    """As in `rewards`."""
    local: LocalCommand | None = None
    """As in `rewards`."""
    replicas: Annotated[ServiceReplicas, FieldMeta(local=ONE_SERVICE)] = ServiceReplicas()
    """Pods of the service. An episode stays on the pod where it began."""
    autoscaling: LoadAutoscaling = LoadAutoscaling()
    """What changes the number of pods. The load is the number of episodes. `builtin` removes pods only while there are
    none, because a pod takes its episodes with it."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time limit for a reset or a step. After this time it is cancelled, and the sample counts as failed."""
    egress: Annotated[Egress | None, FieldMeta(reader="objects", local=NO_POLICIES)] = None
    """As in `rewards`."""
    max_sessions: Annotated[int, Field(ge=1, le=1_048_576)] = 4096
    """Episodes at a time in one process or pod. Further ones wait."""
    idle_seconds: Annotated[float, Field(ge=1, le=604_800)] = 3600.0
    """A session without requests for this long is removed. It must be longer than an answer of the model takes, pauses
    for weight updates and evaluations included."""

    @property
    def target_in_flight(self) -> int:
        """Episodes per pod."""
        return self.autoscaling.target_in_flight or EPISODES_PER_POD

    @property
    def served_by_rljob(self) -> bool:
        """Whether rljob's own service runs the episodes: a builtin or a function."""
        return self.builtin is not None or self.function is not None

    @property
    def checked_by_service(self) -> bool:
        """Whether only the service can check the entry: it has the code or the package."""
        return self.function is not None or (self.builtin is not None and ENVIRONMENTS[self.builtin].needs_package)


class Optimizer(Model):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Highest learning rate: that after the warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moment."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay."""
    decayed: Literal["all", "matrices"] = "all"
    """Parameters that `weightDecay` applies to: `all`, as in verl, or `matrices`: neither norms nor biases, as in
    TRL."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The global gradient norm is clipped to this."""
    max_skipped_updates: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """An update whose gradient is not finite is skipped. The run fails when this many updates in a row were skipped."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up: `constant`; `linear` and `cosine`: falls until `scheduleSteps`; `wsd` (warm-up,
    stable, decay): constant, then falls linearly in the last `decaySteps` of `scheduleSteps`."""
    schedule_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Steps of the schedule, warm-up included; usually `training.steps`. Later steps have the rate of its end."""
    decay_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Last steps of `schedule: wsd`, in which the learning rate falls."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of the schedule, as a share of `learningRate`."""
    offload: bool = False
    """Keep the moments, and a copy of the trained weights, in the memory of the host, and compute AdamW there. It saves
    8 bytes per trained parameter on the GPUs and takes longer. No effect on a CPU, whose memory is the host's."""


class Lora(Model):
    """Adapters of low rank at linear layers: W + (alpha / rank)·B·A, where only A and B are trained."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=65_536)] = 64.0
    """The adapters' result is multiplied by alpha / rank."""
    targets: Annotated[list[Text], Field(min_length=1, max_length=64)] | None = None
    """Names, or ends of names, of the linear layers with adapters, for example `q_proj` or `self_attn.q_proj`. Default:
    all linear layers inside the decoder layers."""


class TrainerParallelism(Model):
    """How the processes share the model. `nodes` × `processesPerNode` must be a multiple of `replicate`, of `tensor` ×
    `pipeline` × `context`, and of `tensor` × `pipeline` × `expert`."""

    replicate: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies of the model (HSDP). The processes of a copy, neighbours by rank, share it (FSDP) and exchange weights;
    between copies only gradients are exchanged, once per update. Only `backend: fsdp`."""
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor parallel size: processes that share each layer and have the same samples. Between the layers each has a
    part of the tokens (sequence parallelism). `backend: megatron`; it must divide the attention heads, the heads of key
    and value, and the size of the MLP."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline parallel size: stages, each with an equal share of the layers, that have the same samples. `backend:
    megatron`; it must divide the number of layers."""
    virtual_pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Groups of layers of each pipeline stage (interleaved schedule): with more groups stages wait less and exchange
    more. Above 1 only with `pipeline` above 1; `pipeline` × `virtualPipeline` must divide the number of layers."""
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    """Context parallel size: processes that share each sample, with two parts of its tokens each. `backend: megatron`,
    with padded samples."""
    expert: Annotated[int, Field(ge=1, le=1024)] = 1
    """Expert parallel size: processes that share the experts of each layer, for a model with experts. They have
    different samples, or parts of samples. `backend: megatron`; it must divide the number of experts."""


class Trainer(Model):
    """The trainer."""

    backend: Annotated[
        Annotated[str, Extension(BACKENDS)],
        Field(description=f"{summaries(BUILTIN_BACKENDS)} Or `module:class` of your own package."),
    ] = "fsdp"
    parallelism: TrainerParallelism = TrainerParallelism()
    """How the processes share the model."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pods of the trainer."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes per pod: one per accelerator. On a CPU their number is free."""
    accelerator: Accelerator = Accelerator()
    """Device type of the trainer."""
    shared_memory: Annotated[Quantity | None, FieldMeta(reader="pods", local=MEMORY)] = None
    """Size limit of /dev/shm, which counts as memory of the pod. Default: the memory limit of the pod."""
    rdma: Annotated[Rdma | None, FieldMeta(reader="pods", local=NO_PODS)] = None
    """RDMA network adapters of a pod."""
    nccl: Annotated[Collectives, FieldMeta(reader="pods")] = {}
    """Environment variables of NCCL and related libraries: `NCCL_*`, `TORCH_NCCL_*`, `GLOO_*`, `UCX_*`, `FI_*`."""
    host_network: Annotated[bool, FieldMeta(reader="pods", local=NETWORK)] = False
    """Pods use the network of their node, as some fabrics need. NetworkPolicies admit them only by `network.nodes`."""
    template: PodTemplate | None = None
    """Kubernetes PodTemplateSpec, merged over the pods that rljob creates."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of parameters in forward and backward; the optimizer state is float32. Default: bfloat16 on NVIDIA
    GPUs, float32 on a CPU."""
    microbatch_tokens: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Tokens of one forward pass on one rank, padding included; a longer sample is processed alone. Default: 16,384 on
    a CPU; on NVIDIA GPUs as many as fit their memory, at most 32,768."""
    packing: Literal["auto", "none", "varlen"] = "auto"
    """`varlen`: the samples of a forward pass follow each other without padding, and attention of variable length keeps
    them apart. Needs a model whose layers have full attention, or attention in a sliding window. `none`: samples are
    padded to the longest one. `auto`: `varlen` on NVIDIA GPUs with flash attention (from Ampere on, in bfloat16), for
    models that support it. A backend of your own decides itself."""
    recompute: Literal["none", "layer"] = "none"
    """`layer`: the backward pass computes the activations of each layer again from the inputs of the layer. It needs a
    fraction of the memory for activations and about a third more time. A backend of your own decides itself."""
    lora: Lora | None = None
    """Train adapters (LoRA) instead of all parameters. Engines and checkpoints get the merged weights; a run is resumed
    from `models`, which must not change, and the adapters in the checkpoint. The learning rate is usually ten times
    that of full fine-tuning. Default: all parameters are trained."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    critic_optimizer: Optimizer | None = None
    """The optimizer of the critic, if the algorithm has one. Default: `optimizer`."""

    @property
    def processes(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.processes_per_node


class EngineParallelism(Model):
    """Parallelism of an engine, which has tensor x pipeline x data workers: processes with one accelerator each."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor parallel size: workers that share each layer."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline parallel size: groups of workers that share the layers; 1 with `engine: sglang`."""
    data: Annotated[int, Field(ge=1, le=1024)] = 1
    """Data parallel size: replicas of the model in one engine; 1 with `engine: sglang`."""

    @property
    def workers(self) -> int:
        """Processes of an engine that hold weights; on GPUs each has one."""
        return self.tensor * self.pipeline * self.data


class Rollout(Model):
    """A pool of inference engines."""

    name: Name
    """Name of the pool."""
    model: Name = "policy"
    """Name of an entry of `models`. `policy`: the engines sample from the trained model and get its weights. Another
    name makes a frozen pool: its engines serve that model to rewards and loops, get no weights and no samples."""
    engine: Annotated[Annotated[str, Extension(ENGINES)], Field(description=engine_docs())] = "vllm"
    hosts: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pods of one engine, each with an equal share of its workers. More than one needs `engine: vllm`, GPUs, and
    KubeRay in the cluster, which connects them by Ray; `rljob run` refuses it."""
    parallelism: EngineParallelism = EngineParallelism()
    """Parallelism of an engine. Each of its workers receives the weights and loads its part of them."""
    accelerator: Accelerator = Accelerator()
    """Device type of the engines."""
    placement: Annotated[Literal["Separate", "Colocated"], FieldMeta(unsupported=True)] = "Separate"
    """`Separate`: engines have their own accelerators. `Colocated`: they share the trainer's in turn."""
    shared_memory: Annotated[Quantity | None, FieldMeta(reader="pods", local=MEMORY)] = None
    """Size limit of /dev/shm, which counts as memory of the pod. Default: the memory limit of the pod."""
    rdma: Annotated[Rdma | None, FieldMeta(reader="pods", local=NO_PODS)] = None
    """RDMA network adapters of a pod."""
    nccl: Annotated[Collectives, FieldMeta(reader="pods")] = {}
    """Environment variables of NCCL and related libraries: `NCCL_*`, `TORCH_NCCL_*`, `GLOO_*`, `UCX_*`, `FI_*`."""
    host_network: Annotated[bool, FieldMeta(reader="pods", local=NETWORK)] = False
    """Pods use the network of their node, as some fabrics need. NetworkPolicies admit them only by `network.nodes`."""
    template: PodTemplate | None = None
    """Kubernetes PodTemplateSpec, merged over the pods that rljob creates."""
    purpose: Literal["training", "evaluation"] = "training"
    """Use of the pool. `evaluation` needs `evaluation.engines: dedicated`."""
    replicas: Replicas = Replicas()
    """Engines of the pool."""
    autoscaling: Autoscaling = Autoscaling()
    """What changes the number of engines. The pool grows while training waits for samples, and shrinks while engines
    are idle. rljob knows no load of a frozen pool."""
    max_concurrency: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Maximum of concurrent requests per engine."""
    max_model_length: Annotated[int, Field(ge=2, le=16_777_216)] = 4096
    """Maximum length of a sequence in tokens, prompt included."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the engine's weights and KV cache. Default: bfloat16 on NVIDIA GPUs, float32 on a CPU."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Size of the KV cache of each worker in bytes. Default: the engine decides."""
    args: Annotated[list[Text], Field(max_length=64)] = []
    """Additional arguments of the engine's server. Arguments that rljob sets itself are refused."""

    @property
    def frozen(self) -> bool:
        """Whether the engines serve a model that is not trained, to rewards and loops."""
        return self.model != "policy"

    @property
    def devices(self) -> int:
        """Accelerators of one pod of an engine."""
        return max(1, self.parallelism.workers // self.hosts)


class Runner(Model):
    """Drives trajectories: renders prompts, requests answers and requests scores."""

    replicas: Replicas = Replicas()
    """Processes; in a cluster pods."""
    autoscaling: LoadAutoscaling = LoadAutoscaling()
    """What changes the number of pods. The load is the number of open samples."""
    template: PodTemplate | None = None
    """Kubernetes PodTemplateSpec, merged over the pods that rljob creates."""

    @property
    def target_in_flight(self) -> int:
        """Open samples per pod."""
        return self.autoscaling.target_in_flight or SAMPLES_PER_RUNNER


class Coordinator(Model):
    """Keeps the state of the run: ledger, batches, policy versions. A job has one coordinator."""

    template: PodTemplate | None = None
    """Kubernetes PodTemplateSpec, merged over the pod that rljob creates."""
