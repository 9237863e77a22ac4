"""Digest of weights, by the definition of :mod:`rljob.protocol.weights`, on the device that holds them."""

from __future__ import annotations

import functools

import blake3
import numpy as np
import numpy.typing as npt
import torch

from rljob.protocol.weights import CHUNK_BYTES

WORD_BYTES = 8
CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
HALF_BITS = 32
SLICE_CHUNKS = 64  # whose sums a GPU computes at a time, with temporary tensors of their size


class Checksum:
    """Digest of the tensors that are passed to :meth:`update`, in wire order."""

    def __init__(self) -> None:
        self._hasher = blake3.blake3()

    def update(self, raw: torch.Tensor, sums: torch.Tensor | None = None) -> None:
        """Add a tensor.

        Args:
            raw: its bytes, uint8, contiguous.
            sums: the :func:`chunk_sums` of the bytes, if they are known.
        """
        size = raw.numel() // CHUNK_BYTES * CHUNK_BYTES
        if size:
            self._hash((chunk_sums(raw) if sums is None else sums).view(torch.uint8))
        self._hash(raw[size:])

    def _hash(self, raw: torch.Tensor) -> None:
        self._hasher.update(raw.cpu().numpy().data)

    def hexdigest(self) -> str:
        """Return the digest, hex."""
        return self._hasher.hexdigest()


def chunk_sums(raw: torch.Tensor) -> torch.Tensor:
    """Return the sums of each whole chunk of some bytes, on their device: int64, chunks x 2.

    Args:
        raw: uint8, contiguous.
    """
    whole = raw[: raw.numel() // CHUNK_BYTES * CHUNK_BYTES]
    if whole.data_ptr() % WORD_BYTES:
        whole = whole.clone()
    return weighted_sums(whole.view(torch.int64))


def weighted_sums(words: torch.Tensor) -> torch.Tensor:
    """Return the sums of each chunk, of its words and of their high halves: int64, chunks x 2.

    Args:
        words: int64, a multiple of CHUNK_WORDS.
    """
    chunks = words.view(-1, CHUNK_WORDS)
    sums = torch.empty(len(chunks), 2, dtype=torch.int64, device=words.device)
    if words.device.type == "cpu":
        _sums_in_cache(chunks.numpy(), sums.numpy())
        return sums
    _sums_in_slices(chunks, sums)
    return sums


def _sums_in_cache(chunks: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]) -> None:
    """Write the sums, one chunk at a time. NumPy's einsum of integers has twice the speed of torch.dot."""
    weights, high = _weights(torch.device("cpu")).numpy(), np.empty(CHUNK_WORDS, np.int64)
    for chunk, both in zip(chunks, sums, strict=True):
        both[0] = np.einsum("i,i", chunk, weights)
        both[1] = np.einsum("i,i", np.right_shift(chunk, HALF_BITS, out=high), weights)


def _sums_in_slices(chunks: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the sums, SLICE_CHUNKS at a time: GPUs have no dot() of int64, and the products need memory."""
    weights = _weights(chunks.device)
    for part, both in zip(chunks.split(SLICE_CHUNKS), sums.split(SLICE_CHUNKS), strict=True):
        torch.sum(part * weights, 1, out=both[:, 0])
        torch.sum((part >> HALF_BITS).mul_(weights), 1, out=both[:, 1])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return the weights of the words of a chunk: splitmix64 of their number, made odd."""
    state = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return torch.from_numpy((state | np.uint64(1)).view(np.int64)).to(device)
