"""Proof, over the communicator of a weight group, that its members are those that know the group's nonce.

gloo accepts the first connection to a member's data port that names a small number, so another process may have taken
the place of a member. Such a process has no connection to the other end of the pair that it broke. The broadcasts of
the proof use the same connections as the broadcasts of a round: the member whose place was taken receives no
challenge, and no process without the nonce can answer it.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Protocol

import torch

from rljob.transfer.handshake import PROOF_BYTES, RANDOM_BYTES, proof
from rljob.transfer.rendezvous import SENDER_RANK


class Member(Protocol):
    """The part of a weight group that the proof uses."""

    rank: int
    size: int
    device: str

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Broadcast ``tensor`` in place from rank ``root``."""


def prove_membership(group: Member, nonce: str, deadline: float) -> None:
    """Prove this member and verify the others.

    The sender broadcasts a challenge, every worker answers with a challenge of its own and its proof, and the sender
    ends with its proof over all of them.

    Args:
        group: complete.
        nonce: of the group.
        deadline: by ``time.monotonic()``.

    Raises:
        RuntimeError: a member did not answer in time, or does not know the nonce.
    """
    own = secrets.token_bytes(RANDOM_BYTES)
    seen = _broadcast(group, own, SENDER_RANK, RANDOM_BYTES, deadline)
    for rank in range(1, group.size):
        answer = own + proof(nonce, "worker of the communicator", rank, seen[:RANDOM_BYTES], own)
        answer = _broadcast(group, answer, rank, RANDOM_BYTES + PROOF_BYTES, deadline)
        theirs = answer[:RANDOM_BYTES]
        expected = proof(nonce, "worker of the communicator", rank, seen[:RANDOM_BYTES], theirs)
        _check(answer[RANDOM_BYTES:], expected, rank)
        seen += answer
    expected = proof(nonce, "sender of the communicator", SENDER_RANK, seen)
    _check(_broadcast(group, expected, SENDER_RANK, PROOF_BYTES, deadline), expected, SENDER_RANK)


def _broadcast(group: Member, message: bytes, root: int, size: int, deadline: float) -> bytes:
    """Return the message of ``root``; other members pass one that is not used."""
    data = torch.frombuffer(bytearray(message[:size].ljust(size)), dtype=torch.uint8).to(group.device)
    group.broadcast(data, root, deadline)
    return bytes(data.cpu().numpy())


def _check(found: bytes, expected: bytes, rank: int) -> None:
    if not hmac.compare_digest(found, expected):
        raise RuntimeError(f"rank {rank} of the weight group does not know its nonce: it is another process")
