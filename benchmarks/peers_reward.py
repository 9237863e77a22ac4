"""The reward of the long-tailed task of benchmarks.peers, for both systems."""

from __future__ import annotations

import zlib


def bit(answer: str) -> float:
    """Return a bit of the answer's checksum: about half of all answers get 1, whatever the model learns."""
    return float(zlib.crc32(answer.encode()) & 1)


def reward(completion: str, problem: dict[str, object]) -> float:
    """Return the reward of a sample; the entry point of rljob."""
    return bit(completion)
