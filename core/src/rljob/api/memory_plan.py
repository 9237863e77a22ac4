"""Peak memory of a trainer's rank, as a pure function of the model's numbers and the trainer's settings.

It describes the FSDP2 backend (``rljob.trainer.backends``) and transformers' dense decoders with flash attention. A
test of the trainer compares it with the bytes that a real step allocates. What CUDA, NCCL and the allocator take
besides the tensors is not part of it: :data:`USABLE` leaves room for that.

Symbols: P parameters, R ranks, b bytes of the dtype, T padded tokens of the largest microbatch, V vocabulary, h hidden
size. Masters, gradients and moments are float32 and sharded: 4 P / R each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rljob.api.model_shape import ModelShape

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Recompute: TypeAlias = Literal["none", "layer"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32 = 4
USABLE = 0.9
"""Share of a GPU's memory for tensors: the CUDA context, NCCL's buffers and fragmentation take the rest."""
CHUNK_BYTES = 1 << 28
"""Float32 logits that the trainer holds at a time; the same as in ``rljob.trainer.logprobs``."""
ONE_EXCHANGE_BYTES = 2 << 30
"""Largest float32 gradient that a rank keeps whole during an update; the same as in the FSDP2 backend."""
EXCHANGE_BYTES = 1 << 28
"""Whole tensors that ranks exchange at a time for a checkpoint; BUCKET_BYTES in the FSDP2 backend's gather_weights."""
GRANULE = 256
"""A derived number of microbatch tokens is a multiple of this."""
MOST_TOKENS = 32_768
"""Largest derived number of microbatch tokens: above it kernels do not become faster."""
TOKEN_BYTES = 256
"""Per token: ids, masks, log-probabilities, rotary angles."""


@dataclass(frozen=True)
class TrainerSettings:
    """What the peaks depend on besides the model.

    ``ranks``: data-parallel ranks that share the parameters. ``tokens``: padded tokens of the largest microbatch, which
    is at least the longest sample. ``recompute``: ``layer`` keeps only the input of each layer for the backward pass.
    ``wire``: where the copy of the weights is while it is sent; ``device`` with NCCL.
    """

    ranks: int
    dtype: Dtype
    tokens: int
    bucket_bytes: int
    recompute: Recompute = "none"
    wire: Literal["device", "host"] = "host"


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
    until every engine has received it, and the copy of one checkpoint until it is written.
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


def plan_memory(model: ModelShape, settings: TrainerSettings) -> MemoryPlan:
    """Return the peaks of a rank."""
    masters = _share(FLOAT32 * model.parameters, settings)
    moments = _share(2 * FLOAT32 * model.parameters, settings)
    state = masters + moments
    device_copy, host_copy = _sent_copy(model, settings, "device"), _sent_copy(model, settings, "host")
    gathered = 0 if settings.ranks == 1 else 2 * FLOAT32 * model.largest_parameter
    rows = _share(FLOAT32 * model.largest_parameter, settings)
    packed = settings.bucket_bytes + DTYPE_BYTES[settings.dtype] * model.largest_parameter
    device_packed, host_packed = (packed, 0) if settings.wire == "device" else (0, packed)
    saved = _saved_bytes(model, settings)
    return MemoryPlan(
        load=Peak(masters + rows, rows),
        step=Peak(step_bytes(model, settings), host_copy + saved),
        update=Peak(state + gathered + device_copy + device_packed, host_copy + host_packed + saved),
        checkpoint=Peak(state + _exchanged_bytes(model, settings) + device_copy, host_copy + saved),
    )


def _saved_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the most bytes that a rank copies for a checkpoint: whole tensors of weights and moments, so that no rank
    has more than the mean and the largest tensor."""
    largest = 3 * FLOAT32 * model.largest_parameter
    return _share(3 * FLOAT32 * model.parameters, settings) + largest - _share(largest, settings)


def _exchanged_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the most bytes of tensors that a rank sends and receives at a time for a checkpoint."""
    if settings.ranks == 1:
        return 0
    bucket = max(min(EXCHANGE_BYTES, FLOAT32 * model.parameters), FLOAT32 * model.largest_parameter)
    return bucket + _share(bucket, settings)


def step_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return the peak on the device of the forward and backward passes and of the optimizer, while weights are sent."""
    size, tokens = DTYPE_BYTES[settings.dtype], settings.tokens
    state = _share(3 * FLOAT32 * model.parameters, settings)  # masters and moments
    gradients = _share(FLOAT32 * model.parameters, settings)
    block, root = size * model.block_parameters, size * model.root_parameters
    layer = layer_bytes(model, settings.dtype)
    if settings.recompute == "layer":
        kept, again = model.layers * size * model.hidden * tokens, layer * tokens
    else:
        kept, again = model.layers * layer * tokens, 0
    kept += (FLOAT32 + 3 * size) * model.hidden * tokens + TOKEN_BYTES * tokens  # last norm, inputs of the output layer
    if settings.ranks == 1 or FLOAT32 * model.parameters <= ONE_EXCHANGE_BYTES:  # one exchange for all microbatches
        parameters, in_passes = size * model.parameters, FLOAT32 * model.parameters
    else:
        parameters, in_passes = root + 2 * block, gradients + size * model.largest_parameter
    working = (size * (3 * model.intermediate + 2 * model.hidden) + FLOAT32 * model.hidden) * tokens
    of_layer = again + working + block + FLOAT32 * model.block_parameters
    passes = in_passes + parameters + kept + max(_output_bytes(model, settings), of_layer)
    # AdamW has temporary tensors over all parameters at once.
    return state + _sent_copy(model, settings, "device") + max(passes, 2 * gradients)


def _sent_copy(model: ModelShape, settings: TrainerSettings, place: Literal["device", "host"]) -> int:
    """Return the bytes on the device or on the host of the copy of all weights that rank 0 sends to the engines."""
    return DTYPE_BYTES[settings.dtype] * model.parameters if settings.wire == place else 0


def _output_bytes(model: ModelShape, settings: TrainerSettings) -> int:
    """Return what the backward pass of the output layer and of the log-probabilities needs, in chunks of positions."""
    size, tokens = DTYPE_BYTES[settings.dtype], settings.tokens
    chunk = max(1, CHUNK_BYTES // (FLOAT32 * model.vocabulary))
    if tokens <= chunk:
        return (2 * size + FLOAT32) * model.vocabulary * tokens
    logits = (2 * size + FLOAT32) * model.vocabulary * chunk
    return logits + size * model.hidden * tokens + (FLOAT32 + size) * model.largest_parameter


def layer_bytes(model: ModelShape, dtype: Dtype) -> int:
    """Return the bytes that one layer keeps for its backward pass, per token.

    Each RMS norm keeps its input in float32, the normalized input and its output; attention keeps query, key, value,
    output and a float32 sum per head; the MLP keeps the results of gate, activation, up, and their product.
    """
    size = DTYPE_BYTES[dtype]
    norms = 2 * (FLOAT32 + 2 * size) * model.hidden
    if model.norms_heads:
        norms += (FLOAT32 + size) * (model.query + model.key)
    attention = 2 * size * (model.query + model.key) + FLOAT32 * model.heads
    return norms + attention + 4 * size * model.intermediate


def most_tokens(model: ModelShape, settings: TrainerSettings, device_bytes: int) -> int:
    """Return the largest number of tokens of a microbatch with which a step fits a device; 0 if none does.

    Args:
        model: the model.
        settings: ``tokens`` is ignored.
        device_bytes: total memory of the device.
    """
    room = int(USABLE * device_bytes)
    return GRANULE * _largest(
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


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that fits, by bisection; 0 if 1 does not fit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _share(size: int, settings: TrainerSettings) -> int:
    return -(-size // settings.ranks)
