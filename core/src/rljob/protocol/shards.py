"""Body of a request for a shard: the samples of a batch that a data-parallel rank needs.

One bit for each sample of the batch, in the order of the batch, from the least significant bit of the first byte.
"""

from __future__ import annotations

from collections.abc import Iterable


class SelectionError(ValueError):
    """A body does not select samples of the batch."""


def encode_selection(indices: Iterable[int], samples: int) -> bytes:
    """Return the body that requests the samples at ``indices`` of a batch of ``samples`` samples."""
    selected = bytearray(-(-samples // 8))
    for index in indices:
        selected[index >> 3] |= 1 << (index & 7)
    return bytes(selected)


def decode_selection(body: bytes, samples: int) -> list[int]:
    """Return the requested indices, in the order of the batch.

    Raises:
        SelectionError: the body does not have exactly one bit for each sample.
    """
    bits = int.from_bytes(body, "little")
    if len(body) != -(-samples // 8) or bits >> samples:
        raise SelectionError(f"the body must have one bit for each of the {samples} samples of the batch")
    selected = ((8 * place, byte) for place, byte in enumerate(body) if byte)  # a rank needs few samples of a batch
    return [first + bit for first, byte in selected for bit in range(8) if byte >> bit & 1]
