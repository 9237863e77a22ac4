"""Peak memory of a trainer's rank, as a pure function of the model's numbers and the trainer's settings.

It describes the FSDP2 backend (``rljob.trainer.backends``) and transformers' dense decoders with flash attention. A
test of the trainer compares it with the bytes that a real step allocates. What CUDA, NCCL and the allocator take
besides the tensors is not part of it: :data:`USABLE` leaves room for that.

Symbols: P parameters, R ranks, b bytes of the dtype, T padded tokens of the largest microbatch, V vocabulary, h hidden
size. Masters, gradients and moments are float32 and sharded: 4 P / R each. With adapters (LoRA) only the A parameters
of the adapters have them, and the model takes b P / R, as does each model that is not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rljob.api.model_shape import ModelShape

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Recompute: TypeAlias = Literal["none", "layer"]
Packing: TypeAlias = Literal["none", "rows", "kernel"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32 = 4
USABLE = 0.9
"""Share of a GPU's memory for tensors: the CUDA context, NCCL's buffers and fragmentation take the rest."""
EXCESS = {"none": 1.15, "layer": 1.25}
"""`recompute` → most times that the planned peak of a step on the device is what the step holds."""
PACKED_EXCESS = 0.15
"""More of :data:`EXCESS` with packed rows, whose padding is counted as if it were the largest."""
CHUNK_BYTES = 1 << 28
"""Float32 logits that the trainer holds at a time; the same as in ``rljob.trainer.logprobs``."""
ONE_EXCHANGE_BYTES = 2 << 30
"""Largest float32 gradient that a rank keeps whole during an update; the same as in the FSDP2 backend."""
EXCHANGE_BYTES = 1 << 28
"""Whole tensors that ranks exchange at a time for a checkpoint, or gather for an update; BUCKET_BYTES in the FSDP2
backend's gather_weights."""
GRANULE = 256
"""A derived number of microbatch tokens is a multiple of this."""
MOST_TOKENS = 32_768
"""Largest derived number of microbatch tokens: above it kernels do not become faster."""
TOKEN_BYTES = 256
"""Per token: ids, masks, log-probabilities, rotary angles."""
CHECKED_TOKENS = 64
"""More than the padded tokens of the check of packed rows."""
PADDED_LIMIT = 4
"""Padded positions of a microbatch of packed rows, as a multiple of its tokens; the same as in
``rljob.trainer.batch_plan``. Only what :data:`TOKEN_BYTES` counts is padded."""


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters of ``rank`` at the linear layers whose names end with one of ``targets``; None: at all."""

    rank: int
    targets: tuple[str, ...] | None = None

    def layers(self, model: ModelShape) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of the linear layers with adapters in one decoder layer, by name."""
        ends = None if self.targets is None else {target.rpartition(".")[2] for target in self.targets}
        return {name: sizes for name, sizes in model.linear_layers.items() if ends is None or name in ends}

    def block_parameters(self, model: ModelShape) -> int:
        """Return the parameters of the adapters of one decoder layer."""
        return self.rank * sum(inputs + outputs for inputs, outputs in self.layers(model).values())


@dataclass(frozen=True)
class TrainerSettings:
    """What the peaks depend on besides the model.

    ``ranks``: data-parallel ranks that share one copy of the parameters. ``tokens``: padded tokens of the largest
    microbatch, which is at least the longest sample. ``recompute``: ``layer`` keeps only the input of each layer for
    the backward pass. ``adapters``: what is trained instead of the model. ``offload``: moments and AdamW are on the
    host. ``copies``: of the parameters, each on its own ranks. ``frozen``: models that are not trained, as reference or
    teacher. ``packing``: whether rows are packed, and their attention computed row by row or by one kernel.
    ``critic``: a critic that is trained beside the policy, all of it; ``critic_offload`` is its ``offload``.
    """

    ranks: int
    dtype: Dtype
    tokens: int
    recompute: Recompute = "none"
    adapters: AdapterSettings | None = None
    offload: bool = False
    copies: int = 1
    frozen: tuple[ModelShape, ...] = ()
    packing: Packing = "none"
    critic: ModelShape | None = None
    critic_offload: bool = False

    @property
    def of_critic(self) -> TrainerSettings:
        """Settings of the critic as if it were trained alone."""
        return replace(self, adapters=None, offload=self.critic_offload, frozen=(), critic=None, critic_offload=False)

    @property
    def processes(self) -> int:
        """Ranks of all copies."""
        return self.ranks * self.copies

    @property
    def plain(self) -> bool:
        """Whether the model is not sharded, so that no whole parameters exist beside the masters."""
        return self.ranks == 1 and self.copies == 1 and self.dtype == "float32"


@dataclass(frozen=True)
class Peak:
    """Most bytes of a rank on the device and on the host; only rank 0 sends weights. On a CPU they are the same
    memory."""

    device: int
    host: int


@dataclass(frozen=True)
class MemoryPlan:
    """Peaks of loading the model, of a step with its update of the weights, of copying the weights for the engines, and
    of a checkpoint.

    What continues in the background counts in the phases beside which it runs: the copy of the weights of one update
    until every engine has received it, and the copy of one checkpoint until it is written. Both are on the host, where
    the memory of the copy of the weights is kept for the next one. With NCCL a GPU has 32 MiB of that copy for each
    engine at a time, which :data:`USABLE` leaves room for.
    """

    load: Peak
    step: Peak
    update: Peak
    checkpoint: Peak

    @property
    def phases(self) -> dict[str, Peak]:
        """Phase → peak."""
        return {"load": self.load, "step": self.step, "update": self.update, "checkpoint": self.checkpoint}

    @property
    def device(self) -> int:
        """The largest peak on the device."""
        return max(peak.device for peak in self.phases.values())

    @property
    def host(self) -> int:
        """The largest peak on the host."""
        return max(peak.host for peak in self.phases.values())


def plan_memory(model: ModelShape, settings: TrainerSettings) -> MemoryPlan:
    """Return the peaks of a rank."""
    if settings.critic is None:
        return _plan_policy(model, settings)
    alone, critic = replace(settings, critic=None, critic_offload=False), settings.critic
    policy, of_critic = _plan_policy(model, alone), settings.of_critic
    masters = _share(_weight_bytes(critic, of_critic), of_critic)
    state = masters + _moments(critic.parameters, of_critic)
    on_host = _share(4 * FLOAT32 * critic.parameters, of_critic) if of_critic.offload else 0
    saved = _saved_bytes(critic, of_critic)
    loading = max(_loading_bytes(critic, of_critic), _loading_bytes(model, alone))
    exchanged = max(_exchanged_bytes(critic, of_critic), _exchanged_bytes(model, alone))
    return MemoryPlan(
        load=Peak(
            policy.load.device + masters + loading - _loading_bytes(model, alone),
            max(policy.load.host, _reading_bytes(critic, of_critic)) + on_host,
        ),
        step=Peak(step_bytes(model, settings), policy.step.host + on_host + saved),
        update=Peak(policy.update.device + state, policy.update.host + on_host + saved),
        checkpoint=Peak(
            policy.checkpoint.device + state + exchanged - _exchanged_bytes(model, alone),
            policy.checkpoint.host + on_host + saved,
        ),
    )


def shared_host_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the peak on the host of all ranks of all copies, if they run on one machine.

    Together they hold what one rank alone would hold: one copy for the engines, and the shards of a checkpoint, which
    one copy of the parameters writes. Every other copy has its own offloaded optimizer.
    """
    alone = replace(settings, ranks=1)
    host = plan_memory(model, alone).host
    on_device = plan_memory(model, replace(alone, offload=False, critic_offload=False)).host
    return host + (settings.copies - 1) * (host - on_device)


def shared_memory(model: ModelShape, settings: TrainerSettings) -> tuple[int, int]:
    """Return the least and the most bytes of the largest peak of all ranks of all copies on one CPU machine, where
    device and host are the same memory."""
    plan, host, processes = plan_memory(model, settings), shared_host_bytes(model, settings), settings.processes
    excess = EXCESS[settings.recompute] + (0.0 if settings.packing == "none" else PACKED_EXCESS)
    return int(processes * plan.step.device / excess) + host, processes * plan.device + host


def _plan_policy(model: ModelShape, settings: TrainerSettings) -> MemoryPlan:
    """Return the peaks of a rank without a critic."""
    trained = _trained_parameters(model, settings)
    masters = _share(_weight_bytes(model, settings), settings)
    frozen = frozen_bytes(settings)
    state = masters + _moments(trained, settings) + frozen
    host_copy = DTYPE_BYTES[settings.dtype] * model.parameters  # of all weights, which rank 0 sends to the engines
    if settings.offload:  # copies of the weights, moments and gradients
        host_copy += _share(4 * FLOAT32 * trained, settings)
    merging, saved = _merging_bytes(model, settings), _saved_bytes(model, settings)
    return MemoryPlan(
        load=Peak(masters + frozen + _loading_bytes(model, settings), _reading_bytes(model, settings)),
        step=Peak(step_bytes(model, settings), host_copy + saved),
        update=Peak(state + _gathered_bytes(model, settings) + merging, host_copy + saved),
        checkpoint=Peak(state + _exchanged_bytes(model, settings) + merging, host_copy + saved),
    )


def frozen_bytes(settings: TrainerSettings) -> int:
    """Return the bytes on the device of the shards of the models that are not trained, in the dtype."""
    return sum(_share(DTYPE_BYTES[settings.dtype] * shape.parameters, settings) for shape in settings.frozen)


def _scoring_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the peak on the device, beside all shards, of a forward pass of a model that is not trained."""
    size, tokens = DTYPE_BYTES[settings.dtype], settings.tokens
    working = (size * (3 * model.intermediate + 4 * model.hidden) + FLOAT32 * model.hidden) * tokens
    kept = _whole_bytes(model, settings) + _token_bytes(settings) * tokens
    return kept + max(working, _output_bytes(model, settings))


def _whole_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes of the whole parameters in a forward pass: the rest of the model and two layers."""
    whole = model.root_parameters + 2 * model.block_parameters
    return 0 if settings.plain else DTYPE_BYTES[settings.dtype] * whole


def _loading_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes on the device, beside all shards, while models are read and checked."""
    return max(_reading_bytes(model, settings), _checking_bytes(model, settings))


def _reading_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes of this rank's rows of the largest tensor."""
    return max(_share(FLOAT32 * shape.largest_parameter, settings) for shape in (model, *settings.frozen))


def _checking_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes of the forward passes of a few tokens that compare packed rows with padded ones."""
    few = replace(settings, tokens=CHECKED_TOKENS)
    shapes = () if settings.packing == "none" else (model, *settings.frozen)
    return max((_scoring_bytes(shape, few) for shape in shapes), default=0)


def _token_bytes(settings: TrainerSettings) -> int:
    return TOKEN_BYTES * (1 if settings.packing == "none" else PADDED_LIMIT)


def _gathered_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes of the weights that are gathered for an update at a time: this rank's rows of a bucket, the rows
    of all ranks, and a whole tensor of them. One rank only converts a tensor."""
    size = DTYPE_BYTES[settings.dtype]
    largest = size * model.largest_parameter
    if settings.ranks == 1:
        return 0 if settings.dtype == "float32" else largest
    bucket = max(min(EXCHANGE_BYTES, size * model.parameters), largest)
    return bucket + _share(bucket, settings) + largest


def _merging_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes that merging adapters needs: all of them whole, and one layer at a time."""
    if settings.adapters is None:
        return 0
    largest = max((inputs * outputs for inputs, outputs in settings.adapters.layers(model).values()), default=0)
    whole = 0 if settings.ranks == 1 else 2 * FLOAT32 * _trained_parameters(model, settings)
    return 2 * FLOAT32 * largest + whole


def _saved_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the most bytes that a rank copies for a checkpoint: whole tensors of weights, moments and adapters, so
    that no rank has more than the mean and the largest tensor."""
    largest = 3 * FLOAT32 * model.largest_parameter
    extra = 3 * FLOAT32 * _trained_parameters(model, settings) if settings.adapters else 2 * FLOAT32 * model.parameters
    return _share(FLOAT32 * model.parameters + extra, settings) + largest - _share(largest, settings)


def _exchanged_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the most bytes of tensors that a rank sends and receives at a time for a checkpoint."""
    if settings.ranks == 1:
        return 0
    bucket = max(min(EXCHANGE_BYTES, FLOAT32 * model.parameters), FLOAT32 * model.largest_parameter)
    return bucket + _share(bucket, settings)


def step_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the peak on the device of the forward and backward passes and of the optimizer, while weights are sent."""
    if settings.critic is not None:  # the two are trained one after the other, each beside the state of the other
        alone, of_critic = replace(settings, critic=None, critic_offload=False), settings.of_critic
        return max(
            step_bytes(model, alone) + _state_bytes(settings.critic, of_critic),
            step_bytes(settings.critic, of_critic) + _state_bytes(model, alone),
        )
    size, tokens, trained = DTYPE_BYTES[settings.dtype], settings.tokens, _trained_parameters(model, settings)
    adapters = 0 if settings.adapters is None else settings.adapters.block_parameters(model)
    state = _state_bytes(model, settings)
    gradients = _share(FLOAT32 * trained, settings)
    block, root = size * (model.block_parameters + adapters), size * model.root_parameters
    layer = layer_bytes(model, settings.dtype, settings.adapters)
    layer += size * model.query if settings.packing == "rows" else 0  # the results of the rows, apart and together
    if settings.recompute == "layer":
        kept, again = model.layers * size * model.hidden * tokens, layer * tokens
    else:
        kept, again = model.layers * layer * tokens, 0
    kept += ((FLOAT32 + 3 * size) * model.hidden + _token_bytes(settings)) * tokens  # last norm, inputs of the head
    if settings.plain:
        parameters, in_passes = 0, FLOAT32 * trained
    elif settings.ranks == 1 or FLOAT32 * model.parameters <= ONE_EXCHANGE_BYTES:  # one exchange for all microbatches
        parameters, in_passes = root + model.layers * block, FLOAT32 * trained
    else:
        parameters = root + 2 * block
        in_passes = gradients + (0 if adapters else size * model.largest_parameter)
    working = (size * (3 * model.intermediate + 2 * model.hidden) + FLOAT32 * model.hidden) * tokens
    of_layer = again + working
    if not settings.plain:  # the gradient before it is summed
        of_layer += (size + FLOAT32) * (adapters or model.block_parameters)
    passes = in_passes + parameters + kept + max(_output_bytes(model, settings), of_layer)
    # AdamW has temporary tensors over all parameters at once.
    of_optimizer = gradients if settings.offload else 2 * gradients
    scoring = max((_scoring_bytes(shape, settings) for shape in settings.frozen), default=0)
    return state + max(passes, of_optimizer, scoring)


def _state_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes on the device of masters, moments and models that are not trained."""
    moments = _moments(_trained_parameters(model, settings), settings)
    return _share(_weight_bytes(model, settings), settings) + moments + frozen_bytes(settings)


def _moments(trained: int, settings: TrainerSettings) -> int:
    """Return the bytes of AdamW's moments on the device."""
    return 0 if settings.offload else _share(2 * FLOAT32 * trained, settings)


def _trained_parameters(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the number of parameters with gradient and moments."""
    if settings.adapters is None:
        return model.parameters
    return model.layers * settings.adapters.block_parameters(model)


def _weight_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the bytes of the weights on all ranks: float32 where they are trained, else in the dtype."""
    trained = FLOAT32 * _trained_parameters(model, settings)
    return trained if settings.adapters is None else trained + DTYPE_BYTES[settings.dtype] * model.parameters


def _output_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return what the backward pass of the output layer and of the log-probabilities needs, in chunks of positions."""
    size, tokens = DTYPE_BYTES[settings.dtype], settings.tokens
    if model.values:  # inputs of the head in float32, and their gradient
        return 2 * FLOAT32 * model.hidden * tokens
    chunk = max(1, CHUNK_BYTES // (FLOAT32 * model.vocabulary))
    if tokens <= chunk:
        return (2 * size + FLOAT32) * model.vocabulary * tokens
    logits = (2 * size + FLOAT32) * model.vocabulary * chunk
    gradient = 0 if settings.adapters else (FLOAT32 + size) * model.embedding_parameters
    return logits + size * model.hidden * tokens + gradient


def layer_bytes(model: ModelShape, dtype: Dtype, adapters: AdapterSettings | None = None) -> int:
    """Return the bytes that one layer keeps for its backward pass, per token.

    Each RMS norm keeps its input in float32, the normalized input and its output; attention keeps query, key, value,
    output and a float32 sum per head; the MLP keeps the results of gate, activation, up, and their product. With
    adapters no weight has a gradient: norms keep no normalized input, and inputs of linear layers are kept where an
    adapter needs them, with the result of A.
    """
    size = DTYPE_BYTES[dtype]
    attention = 2 * size * (model.query + model.key) + FLOAT32 * model.heads
    kept = 2 * FLOAT32 * model.hidden + attention + 3 * size * model.intermediate
    if model.norms_heads:
        kept += FLOAT32 * (model.query + model.key)
    if adapters is None:
        normalized = 2 * model.hidden + (model.query + model.key if model.norms_heads else 0)
        return kept + size * (normalized + 2 * model.hidden + model.intermediate)
    adapted = adapters.layers(model)
    inputs = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)]
    needed = sum(model.linear_layers[names[0]][0] for names in inputs if not adapted.keys().isdisjoint(names))
    return kept + size * (needed + adapters.rank * len(adapted))


def most_tokens(model: ModelShape, settings: TrainerSettings, device_bytes: int) -> int:
    """Return the largest number of tokens of a microbatch with which a step fits a device; 0 if none does.

    Args:
        model: the model.
        settings: ``tokens`` is ignored.
        device_bytes: total memory of the device.
    """
    room = int(USABLE * device_bytes)
    return GRANULE * largest(
        lambda granules: step_bytes(model, replace(settings, tokens=GRANULE * granules)) <= room,
        MOST_TOKENS // GRANULE,
    )


def fewest_ranks(model: ModelShape, settings: TrainerSettings, device_bytes: int, most: int = 1024) -> int | None:
    """Return the smallest number of ranks with which all phases fit; None if ``most`` ranks are not enough."""
    room = int(USABLE * device_bytes)
    return next(
        (ranks for ranks in range(1, most + 1) if plan_memory(model, replace(settings, ranks=ranks)).device <= room),
        None,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that fits, by bisection; 0 if 1 does not fit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _share(size: int, settings: TrainerSettings) -> int:
    return -(-size // settings.ranks)
