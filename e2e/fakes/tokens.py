"""The tokens of the fake engine: a pure function of weights, prompt, seed and position.

Every token depends on the weights and all earlier tokens, so generation that resumes from a prefix with
the same seed gives the tokens of uninterrupted generation, and new weights change only later tokens. Lengths are
long-tailed: one sample in eight is likely to be eight times as long as the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import blake3

MASK = 2**64 - 1
PRINTABLE = 94  # ids 1..94 are '!'..'~' in the tokenizer of e2e/fakes/model.py
SHORT, LONG = 6, 48  # mean lengths


def mix(x: int) -> int:
    """Return a hashed 64-bit number (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def weights_key(digest: str) -> int:
    """Return the 64-bit number by which weights of this digest change the tokens."""
    return int.from_bytes(blake3.blake3(digest.encode()).digest(8), "little")


@dataclass
class Stream:
    """One sequence during generation. ``stops``: token ids that end it; the stream writes the first of them."""

    context: int
    mean_length: int
    max_tokens: int
    stops: Sequence[int]
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def step(self, weights: int) -> str:
        """Write a token under ``weights``; return its finish (stop | length) or an empty string."""
        drawn = mix(self.context ^ weights)
        stopping = (drawn >> 32) % self.mean_length == 0
        token = self.stops[0] if stopping else 1 + drawn % PRINTABLE
        self.context = mix(self.context ^ token)
        self.token_ids.append(token)
        self.logprobs.append(-((drawn >> 16) % 4096) / 1024)
        if stopping:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else ""


def begin(prompt: bytes, seed: int, max_tokens: int, stops: Sequence[int]) -> Stream:
    """Return the stream that continues ``prompt`` (int32)."""
    context = mix(seed)
    for token in array("i", prompt):
        context = mix(context ^ token)
    return Stream(context, LONG if mix(seed) % 8 == 0 else SHORT, max_tokens, stops)


def write(digest: str, prompt: bytes, seed: int, max_tokens: int, stops: Sequence[int]) -> tuple[Stream, str]:
    """Return a whole sequence written under one version of the weights, and its finish."""
    stream, weights, finish = begin(prompt, seed, max_tokens, stops), weights_key(digest), ""
    while not finish:
        finish = stream.step(weights)
    return stream, finish


def reward(text: str) -> float:
    """Return the fake reward of an answer: 0 or 1, by its text."""
    return float(blake3.blake3(text.encode()).digest(1)[0] & 1)


def next_state(state: str, shard: bytes) -> str:
    """Return the fake trainer's weights after a batch: a digest of all batches that were applied."""
    return blake3.blake3(state.encode() + shard).hexdigest()


FIRST_STATE = blake3.blake3(b"the model before training").hexdigest()
