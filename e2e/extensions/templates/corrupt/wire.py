"""Importing this module corrupts the first bucket of the second round of weights that the process receives."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from rljob.protocol.messages import ParameterMeta
from rljob.transfer import receiver
from rljob.transfer.membership import Member
from rljob.transfer.rounds import LoadWeights, receive_round

log = logging.getLogger(__name__)

MESSAGE = "a bucket was corrupted"
_rounds = 0


class _CorruptMember:
    """A worker's end of a group. Negates the float32 numbers of the first broadcast."""

    def __init__(self, group: Member) -> None:
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self._group = group
        self._broadcasts = 0

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        self._group.broadcast(tensor, root, deadline)
        self._broadcasts += 1
        if self._broadcasts == 1:
            tensor[3::4] ^= 0x80
            log.warning(MESSAGE)


def _receive_round(
    group: Member, parameters: Sequence[ParameterMeta], bucket_bytes: int, load: LoadWeights, deadline: float
) -> str:
    global _rounds
    _rounds += 1
    member = _CorruptMember(group) if _rounds == 2 else group
    return receive_round(member, parameters, bucket_bytes, load, deadline)


receiver.receive_round = _receive_round
