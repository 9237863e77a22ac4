"""Importing this module corrupts the first bucket of the second round of weights that the process receives.

Requests are in flight when that round begins: engines generate the second batch slowly until then, because an engine
can be faster than any trainer.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from rljob.transfer import receiver
from rljob.transfer.bucket_wires import Wait
from rljob.transfer.rounds import WiredMember, receive_round

log = logging.getLogger(__name__)

MESSAGE = "a bucket was corrupted"
FIRST_SLOW_REQUEST = 24
"""Of the 32 before the round, at most 4 at a time: the 16 of the first batch have ended when it starts."""
_rounds = _requests = 0


def before_step(new_requests: int, seconds: float) -> None:
    """Sleep ``seconds`` before a step of the model if it has requests of the second batch and the round has not begun.

    Args:
        new_requests: that the step begins.
        seconds: of one step.
    """
    global _requests
    _requests += new_requests
    if _requests >= FIRST_SLOW_REQUEST and _rounds < 2:
        time.sleep(seconds)


class _CorruptMember:
    """A worker's end of a group. Negates the float32 numbers of the first broadcast."""

    def __init__(self, group: WiredMember) -> None:
        self.rank, self.size, self.device, self.wire = group.rank, group.size, group.device, group.wire
        self._group = group
        self._broadcasts = 0

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        self.begin_broadcast(tensor, root, deadline)()

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Wait:
        received = self._group.begin_broadcast(tensor, root, deadline)
        self._broadcasts += 1
        first = self._broadcasts == 1

        def wait() -> None:
            received()
            if first:
                tensor[3::4] ^= 0x80
                log.warning(MESSAGE)

        return wait


def _receive_round(group: WiredMember, *arguments: Any) -> str:
    global _rounds
    _rounds += 1
    return receive_round(_CorruptMember(group) if _rounds == 2 else group, *arguments)


receiver.receive_round = _receive_round
