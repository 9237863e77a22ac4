"""Roles of a manifest: what runs as a part of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rljob.api.base import Collectives, Model, Name, Quantity, Text, Url
from rljob.api.kubernetes import Accelerator, Rdma
from rljob.api.pods import PodTemplate

OF_PODS = ("sharedMemory", "rdma", "nccl", "hostNetwork")
"""Fields of trainer and pools that, as `template`, say how their pods are made and nothing that a part reads."""


class Replicas(Model):
    """How many copies of a part run."""

    min: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies that are started."""
    max: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most copies that are started when there is more to do; `min` when left out."""


class LocalCommand(Model):
    """How `rljob run` starts a service whose container is yours."""

    command: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Command and arguments. The program listens at RLJOB_LISTEN (HOST:PORT; in a cluster
    :PORT, which is all addresses)."""


class Reward(Model):
    """A reward service: `builtin`, `url`, or a container of your own: `template`, and `local` for `rljob run`."""

    name: Name
    """Name that tasks refer to."""
    builtin: Literal["reasoning_gym", "exact_match"] | None = None
    """Scorer that ships with rljob. `reasoning_gym`: the dataset's own verdict on the extracted answer, 0 or 1.
    `exact_match`: 1 when the answer equals a column of the row, else 0."""
    config: Annotated[dict[Text, Any], Field(max_length=64)] = {}
    """Options of the builtin. `exact_match`: `column` (default answer), `extract` (a regular expression; its last match
    in the completion, or that match's first group, is the answer; the whole text when left out), `ignoreCase`."""
    url: Url | None = None
    """Address of a service that runs elsewhere; samples are posted to URL/v1/score."""
    template: PodTemplate | None = None
    """Kubernetes' PodTemplateSpec, merged over the pod that rljob makes; of a service of your own, its container
    `main`."""
    local: LocalCommand | None = None
    """How `rljob run` starts a service of your own."""
    replicas: Replicas = Replicas()
    """Pods of the service."""
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    """Worker processes that score samples."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A sample that takes longer to score counts as failed, and its worker is replaced."""


class Environment(Model):
    """An environment service: `builtin`, `url`, or a container of your own, as for rewards."""

    name: Name
    """Name of the environment."""
    builtin: Name | None = None
    """Environment that ships with rljob."""
    url: Url | None = None
    """Address of a service that runs elsewhere."""
    template: PodTemplate | None = None
    """As in `rewards`."""
    local: LocalCommand | None = None
    """As in `rewards`."""
    replicas: Replicas = Replicas()
    """Pods of the service."""


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


class TrainerParallelism(Model):
    """How the trainer's model is cut up; what is left of the processes holds copies of it."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share every matrix."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share the layers."""
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share every sequence."""
    expert: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share the experts of a mixture."""


class Trainer(Model):
    """The trainer."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp`: PyTorch FSDP2. `megatron`: Megatron Core."""
    parallelism: TrainerParallelism = TrainerParallelism()
    """How the model is cut up."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pods of the trainer."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes, one per accelerator, or on CPU one per data-parallel rank."""
    accelerator: Accelerator = Accelerator()
    """What the trainer computes on."""
    shared_memory: Quantity | None = None
    """Bound of /dev/shm of a pod, which counts as memory of the pod; as much as the pod may have when left out."""
    rdma: Rdma | None = None
    """Network adapters for RDMA that a pod gets."""
    nccl: Collectives = {}
    """Variables of NCCL and what it works with: their names begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_."""
    host_network: bool = False
    """Pods use the network of their node, as some fabrics demand. Policies know such pods by `network.nodes` only."""
    template: PodTemplate | None = None
    """Kubernetes' PodTemplateSpec, merged over the pods that rljob makes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters in forward and backward; the optimizer's are float32."""
    microbatch_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 16_384
    """Padded tokens of one forward pass on one rank; a longer single sample still goes alone."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""


class EngineParallelism(Model):
    """How an engine's model is cut up."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Accelerators that share every matrix."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Accelerators that share the layers."""
    data: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies of the model in one engine."""


class Rollout(Model):
    """A pool of inference engines."""

    name: Name
    """Name of the pool."""
    model: Name = "policy"
    """Name of an entry of `models`."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """The inference engine."""
    hosts: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pods of one engine."""
    parallelism: EngineParallelism = EngineParallelism()
    """How an engine's model is cut up."""
    accelerator: Accelerator = Accelerator()
    """What the engines compute on."""
    placement: Literal["Separate", "Colocated"] = "Separate"
    """`Separate`: on accelerators of their own. `Colocated`: on the trainer's, in turn with it."""
    shared_memory: Quantity | None = None
    """Bound of /dev/shm of a pod, which counts as memory of the pod; as much as the pod may have when left out."""
    rdma: Rdma | None = None
    """Network adapters for RDMA that a pod gets."""
    nccl: Collectives = {}
    """Variables of NCCL and what it works with: their names begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_."""
    host_network: bool = False
    """Pods use the network of their node, as some fabrics demand. Policies know such pods by `network.nodes` only."""
    template: PodTemplate | None = None
    """Kubernetes' PodTemplateSpec, merged over the pods that rljob makes."""
    purpose: Literal["training", "evaluation"] = "training"
    """What the pool's engines do. `evaluation` needs `evaluation.engines: dedicated`."""
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


class Runner(Model):
    """What drives trajectories: makes prompts, has them answered and has the answers scored."""

    replicas: Replicas = Replicas()
    """Processes, in a cluster pods."""
    template: PodTemplate | None = None
    """Kubernetes' PodTemplateSpec, merged over the pods that rljob makes."""


class Coordinator(Model):
    """What holds the run together: its ledger, batches and versions. There is one."""

    template: PodTemplate | None = None
    """Kubernetes' PodTemplateSpec, merged over the pod that rljob makes."""
