"""Samples of a batch: their scalars, which a Train message has, and their tokens, which the trainer's ranks pull as
shards (rljob.protocol.shards)."""

from __future__ import annotations

from typing import Literal

import msgspec

from rljob.protocol.shared_messages import VersionSpan


class BatchSample(msgspec.Struct, array_like=True):
    """Scalars of one sample of a batch."""

    sample: str
    group: str
    reward: float
    prompt_tokens: int  # of the first turn
    response_tokens: int  # that the model wrote, in all turns
    total_tokens: int  # of all sequences: prompt, model and observations
    min_version: int
    temperature: float
    max_tokens: int
    sequences: list[int] = []  # tokens of each sequence; empty: there is one
    baseline: float | None = None  # reward of the greedy answer of its group, which is not in the batch
    turn_rewards: list[float] = []  # of each turn by branch; empty unless the advantage is gigpo or a user's own
    turn_states: list[str] = []  # of each turn: equal for equal states; empty: unknown
    truncated: bool = False  # its last answer was cut at a limit of tokens
    task: str = ""  # for metrics


class Segment(msgspec.Struct, array_like=True):
    """Tokens [start, end) of a sample. Each turn has one ``model`` segment, which is empty if the model wrote no token;
    before it comes the ``prompt`` (first turn) or an ``observation`` (later turns), unless it has no tokens. Each
    sequence but the first begins with a ``prefix`` if it shares turns with an earlier one: they are trained there."""

    kind: Literal["prompt", "model", "observation", "prefix"]
    start: int
    end: int
    reward: float = 0.0  # of the turn; 0 for prompts and observations


class SampleTokens(msgspec.Struct, array_like=True):
    """Tokens of one sample of a batch: the prompt, then what the model wrote and observed, turn by turn. A sample with
    branches has several such sequences, one after the other: one for each branch that no other branch continues.

    ``segments`` cover all tokens in order. Their rewards add up to the sample's reward, except for rounding.
    """

    sample: str
    token_ids: bytes  # int32, all sequences
    logprobs: bytes  # float32, all sequences; 0 where the model did not write, and in a prefix
    segments: list[Segment]
    spans: list[VersionSpan]  # over all sequences
    ends: list[int] = []  # of each sequence; empty: there is one
    models: dict[str, bytes] = {}  # role of a model of a frozen pool → float32 of each token of the loss mask

    @property
    def loss_mask(self) -> bytes:
        """uint8 over all sequences; 1 where the model wrote, except in a prefix."""
        return b"".join((b"\x01" if s.kind == "model" else b"\x00") * (s.end - s.start) for s in self.segments)
