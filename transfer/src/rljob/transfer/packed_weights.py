"""The weights of one version, packed for the wire: one copy on the host for all engines, and one digest.

The trainer's rank 0 makes it for each update. The thread that owns the model fills one bucket after the other, while
the sends of the update read the buckets that are complete, and a thread computes the digest. The copy is what lets a
step begin while a slow engine still receives. It is on the host also where the weights are on a GPU, of which the
digest's sums are computed: the GPU holds the tensors of one bucket that is gathered, never the model again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from rljob.protocol.shared_messages import ParameterMeta
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.checksum import Checksum, chunk_sums
from rljob.transfer.snapshot_stream import Mark, SnapshotStream
from rljob.transfer.wire_plan import NamedTensors, PackedTensor, WirePlan


@dataclass(frozen=True)
class _Filled:
    """A bucket that has been filled, or will be once the device has reached ``mark``.

    Attributes:
        bucket: uint8, on the host.
        sums: of each tensor's chunks, if a GPU computed them.
        mark: after the last copy from a GPU.
    """

    bucket: torch.Tensor
    sums: Sequence[torch.Tensor | None]
    mark: Mark | None


class PackedWeights:
    """Buckets in wire order; see :mod:`rljob.protocol.weights`.

    Args:
        plan: of the tensors.
    """

    def __init__(self, plan: WirePlan) -> None:
        self.plan = plan
        self._filled: list[Future[_Filled]] = [Future() for _ in plan.buckets]
        self._digest: Future[str] = Future()
        threading.Thread(target=self._hash, daemon=True, name="hash-weights").start()

    @classmethod
    def of(cls, plan: WirePlan, buckets: Sequence[torch.Tensor]) -> PackedWeights:
        """Return weights whose buckets are filled. ``buckets``: uint8, on the host."""
        weights = cls(plan)
        for filled, pieces, bucket in zip(weights._filled, plan.buckets, buckets, strict=True):
            filled.set_result(_Filled(bucket, [None] * len(pieces), None))
        return weights

    @property
    def parameters(self) -> list[ParameterMeta]:
        """Metadata of the tensors, in wire order."""
        return self.plan.parameters

    @property
    def tensors(self) -> str:
        """Digest of :attr:`parameters`."""
        return self.plan.tensors

    @property
    def buckets(self) -> list[torch.Tensor]:
        """All buckets; waits until they are filled. They must not change."""
        return [self.bucket(i) for i in range(len(self._filled))]

    def bucket(self, i: int, deadline: float | None = None) -> torch.Tensor:
        """Return bucket ``i``, uint8, once it is filled.

        Raises:
            RuntimeError: the deadline (``time.monotonic()``) passed, or the weights cannot be gathered.
        """
        return self._wait(i, deadline).bucket

    def digest(self) -> str:
        """Return the digest, hex. A thread computes it while the buckets are sent; waits for the thread."""
        return self._digest.result()

    def fill(
        self, tensors: NamedTensors, buffers: BucketBuffers | None = None, stream: SnapshotStream | None = None
    ) -> None:
        """Copy the tensors into the buckets, of which each can be sent when it is complete. The caller may change the
        weights afterwards. Beside the copy, memory holds what ``tensors`` does.

        Args:
            tensors: those of the plan, in its order, in any type; each is read before the next one is requested.
            buffers: of the copy before. They are reused if nothing sends it any more; those of one copy are kept.
            stream: of the device of the tensors; None: they are on the host.
        """
        try:
            self._fill(tensors, BucketBuffers() if buffers is None else buffers, stream or SnapshotStream())
        except BaseException as error:  # raised in the threads that wait, too
            for filled in self._filled:
                if not filled.done():
                    filled.set_exception(RuntimeError(f"the weights were not gathered: {error!r}"))
            raise

    def _fill(self, tensors: NamedTensors, buffers: BucketBuffers, stream: SnapshotStream) -> None:
        source = iter(tensors)
        with stream.copying():
            for pieces, size, filled in zip(self.plan.buckets, self.plan.sizes, self._filled, strict=True):
                bucket = buffers.take(size)
                sums = []
                for piece in pieces:
                    name, tensor = next(source, ("", torch.empty(0)))
                    if name != piece.meta.name or list(tensor.shape) != piece.meta.shape:
                        raise ValueError(f"{name} {list(tensor.shape)} is not the planned {piece.meta}")
                    sums.append(_copy(piece, bucket, tensor.detach()))
                    del tensor  # before the next one is gathered
                filled.set_result(_Filled(bucket, sums, stream.mark()))
                del bucket
            if (more := next(source, None)) is not None:
                raise ValueError(f"{more[0]} was not planned")
        buffers.keep(len(self.plan.buckets))

    def _wait(self, i: int, deadline: float | None = None) -> _Filled:
        try:
            filled = self._filled[i].result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise RuntimeError("the weights were not gathered in time") from None
        if filled.mark is not None:
            filled.mark.synchronize()
        return filled

    def _hash(self) -> None:
        try:
            checksum = Checksum()
            for i, pieces in enumerate(self.plan.buckets):
                filled = self._wait(i)
                for piece, sums in zip(pieces, filled.sums, strict=True):
                    checksum.update(piece.bytes_of(filled.bucket), sums)
        except Exception as error:  # noqa: BLE001 raised in the threads that wait
            self._digest.set_exception(error)
        else:
            self._digest.set_result(checksum.hexdigest())


def _copy(piece: PackedTensor, bucket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy a tensor to its place; return the sums of its chunks if a GPU has them computed."""
    if tensor.device.type == "cpu":
        piece.write(bucket, tensor)
        return None
    converted = tensor.to(piece.dtype).contiguous()
    piece.write(bucket, converted)
    return chunk_sums(converted.view(-1).view(torch.uint8)).to("cpu", non_blocking=True)


def pack(
    tensors: NamedTensors,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    buffers: BucketBuffers | None = None,
) -> PackedWeights:
    """Return packed weights that are complete, with a plan of their own; see :class:`WirePlan` and
    :meth:`PackedWeights.fill`."""
    held = list(tensors)
    weights = PackedWeights(WirePlan.of(held, bucket_bytes, dtype))
    weights.fill(held, buffers)
    return weights
