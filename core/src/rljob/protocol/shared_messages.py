"""What the messages of several peers have in common. The messages of a peer are in agent_protocol, trainer_protocol and
runner_protocol: one WebSocket each from agents, trainer rank 0 and runners to the coordinator.

Arrays are raw little-endian bytes: token ids int32, log-probabilities float32 (natural logarithm). Everything a sender
must not lose is sent again after a reconnect until it is acknowledged; every receiver takes repetitions.

``sample`` names one (prompt, member): ``g17.3`` is member 3 of the 17th training group, ``e20.17.0`` member 0 of row
17 of the evaluation at policy version 20. ``attempt`` counts fresh sampling streams: of a request (RequestId) those of
its turn; of a lease and of the messages of its runner those that were discarded before it. ``lease`` is the number
of a lease, unique in the run and growing: messages of the holder of another lease do not count.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class VersionSpan(msgspec.Struct, array_like=True):
    """Tokens [start, end) of a completion were sampled under policy ``version``."""

    version: int
    start: int
    end: int


class ParameterMeta(msgspec.Struct, array_like=True):
    """One tensor of the model, Hugging Face name."""

    name: str
    dtype: str  # torch's name: float32, bfloat16
    shape: list[int]


class Probe(msgspec.Struct, array_like=True):
    """Fixed sequences and the trainer's log-probability of each token but the first, at temperature 1."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


class Reject(Message):
    """Coordinator to anyone: the message or registration is refused; ``fatal`` means exit with code 2."""

    reason: str
    fatal: bool
