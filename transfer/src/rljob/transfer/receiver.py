"""The receiving end of a weight group, in the workers of every engine.

The adapter code of an engine maps the engine's calls to these methods and loads the tensors. The methods block, so the
thread that owns the model calls them while no request is computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rljob.protocol.shared_messages import ParameterMeta
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.rendezvous import Rendezvous
from rljob.transfer.rounds import KEPT_BUCKETS, LoadWeights, receive_round
from rljob.transfer.weight_group import WeightGroup
from rljob.transfer.wire_plan import WirePlan

KEPT_SIZE = 2
"""Buckets of up to this many times ``bucket_bytes`` have buffers that are kept between updates. Larger ones hold one
large tensor, mostly the embedding."""


class WeightReceiver:
    """Membership of one weight group at a time.

    Between updates it keeps at most KEPT_BUCKETS x KEPT_SIZE x ``bucket_bytes`` of the host's memory, whatever the size
    of the model.

    Args:
        device: the worker's GPU, used by nccl.

    Attributes:
        digest: of the bytes of the last received round, hex.
    """

    def __init__(self, device: str) -> None:
        self.digest = ""
        self._device = device
        self._group: WeightGroup | None = None
        self._bucket_bytes = 0
        self._buffers = BucketBuffers()
        self._plan = WirePlan([], 0)

    def join(
        self, rendezvous: Rendezvous, rank: int, transport: str, bucket_bytes: int, timeout_seconds: float
    ) -> None:
        """Leave the current group, if any, and join this one.

        Args:
            rendezvous: of the group, from PrepareWeights.
            rank: of this worker, at least 1.
            transport: gloo, nccl or ipc.
            bucket_bytes: size of one broadcast; the same value as at the sender.
            timeout_seconds: of joining.

        Raises:
            RuntimeError: the sender is absent, did not join in time, or does not know the nonce.
        """
        self.leave()
        if self._bucket_bytes != bucket_bytes:
            self._bucket_bytes = bucket_bytes
            self._buffers = BucketBuffers(KEPT_BUCKETS, KEPT_SIZE * bucket_bytes)
        self._group = WeightGroup.join(rendezvous, rank, transport, timeout_seconds, self._device)

    def receive(self, parameters: Sequence[ParameterMeta], load: LoadWeights, timeout_seconds: float) -> None:
        """Receive one round; call ``load`` for each bucket.

        Raises:
            RuntimeError: no group is joined, or the sender died or is too slow.
            ValueError: the received bytes are not those that were sent.

        After a failure of any kind, ``load`` included, the group is left and the loaded weights must not be used: they
        may be a mixture. An engine commits an update only after this method has returned.
        """
        if self._group is None:
            raise RuntimeError("no weight group is joined")
        deadline = time.monotonic() + timeout_seconds
        if self._plan.parameters != parameters or self._plan.bucket_bytes != self._bucket_bytes:
            self._plan = WirePlan(parameters, self._bucket_bytes)
        try:
            self.digest = receive_round(self._group, self._plan, load, deadline, self._buffers)
        except BaseException:  # re-raised; the group must be left after a cancellation too
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group, if any. Returns at once."""
        group, self._group = self._group, None
        if group is not None:
            group.abandon()
