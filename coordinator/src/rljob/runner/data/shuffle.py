"""The order of a pass over rows: a permutation that takes no memory.

A Feistel network permutes the numbers below a power of four, and is repeated until it lands below the number of rows
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Its round function is blake3 under the pass's key.
"""

from __future__ import annotations

import struct

import blake3

ROUNDS = 8


def pass_key(seed: int, task: str, split: str, number: int) -> bytes:
    """Return the key of pass ``number`` over a split of a task: 32 bytes."""
    return blake3.blake3(struct.pack("<QQ", seed, number) + f"{task}/{split}".encode()).digest()


def shuffled(place: int, size: int, key: bytes) -> int:
    """Return the row that comes at ``place`` (0 … ``size`` − 1) of the order that ``key`` draws."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            drawn = blake3.blake3(struct.pack("<QB", right, turn), key=key).digest(8)
            left, right = right, left ^ (int.from_bytes(drawn, "little") & mask)
        place = left << half | right
        if place < size:
            return place
