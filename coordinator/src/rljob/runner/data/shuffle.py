"""The order of a pass over rows: a permutation that is computed per row and not stored.

A Feistel network permutes the numbers below a power of four and is repeated until the result is below the number of
rows (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Its round function is blake3 with the key of
the pass.
"""

from __future__ import annotations

import struct

import blake3

ROUNDS = 8


def pass_key(seed: int, task: str, split: str, number: int) -> bytes:
    """Return the key of pass ``number`` over a split of a task: 32 bytes."""
    return blake3.blake3(struct.pack("<QQ", seed, number) + f"{task}/{split}".encode()).digest()


def shuffled(place: int, size: int, key: bytes) -> int:
    """Return the row at ``place`` (0 … ``size`` − 1) in the order of ``key``."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            output = blake3.blake3(struct.pack("<QB", right, number), key=key).digest(8)
            left, right = right, left ^ (int.from_bytes(output, "little") & mask)
        place = left << half | right
        if place < size:
            return place
