"""The digest of weights: its definition, and what it detects."""

import blake3
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rljob.protocol.weights import CHUNK_BYTES
from rljob.transfer import checksum
from rljob.transfer.checksum import Checksum, weighted_sums

GENERATOR = torch.Generator().manual_seed(1)
LARGE = torch.randint(0, 256, (2 * CHUNK_BYTES + 21,), dtype=torch.uint8, generator=GENERATOR)
SMALL = LARGE[:999]


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def digest(*tensors):
    checksum = Checksum()
    for tensor in tensors:
        checksum.update(tensor)
    return checksum.hexdigest()


def splitmix64(number):
    state = number * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def plain(tensor):
    """Return what the definition hashes of a tensor."""
    raw, hashed = bytes(tensor.numpy()), b""
    while len(raw) >= CHUNK_BYTES:
        chunk, raw = raw[:CHUNK_BYTES], raw[CHUNK_BYTES:]
        words = (int.from_bytes(chunk[i : i + 8], "little") for i in range(0, CHUNK_BYTES, 8))
        low = high = 0
        for number, word in enumerate(words, start=1):
            weight, half = splitmix64(number) | 1, word >> 32
            low += weight * word
            high += weight * (half - (half >> 31 << 32))
        hashed += (low % 2**64).to_bytes(8, "little") + (high % 2**64).to_bytes(8, "little")
    return hashed + raw


def test_the_digest_is_that_of_the_definition():
    assert digest(SMALL, LARGE) == blake3.blake3(plain(SMALL) + plain(LARGE)).hexdigest()
    assert digest(LARGE[3:]) == digest(LARGE[3:].clone()), "not aligned"


def test_a_gpu_computes_the_same_sums_in_slices(monkeypatch):
    monkeypatch.setattr(checksum, "SLICE_CHUNKS", 2)
    chunks = torch.cat([LARGE[i : i + CHUNK_BYTES] for i in (0, 1, 2)]).view(torch.int64).view(3, -1)
    sums = torch.zeros(3, 2, dtype=torch.int64)
    with Largest() as seen:
        checksum._sums_in_slices(chunks, sums)
    assert sums.equal(weighted_sums(chunks.view(-1)))
    assert seen.nbytes == 2 * CHUNK_BYTES


@pytest.mark.parametrize("place", [0, 8 * 12345 + 7, CHUNK_BYTES, 2 * CHUNK_BYTES, len(LARGE) - 1])
def test_a_flipped_bit_anywhere_changes_the_digest(place):
    for bit in (0, 7):
        changed = LARGE.clone()
        changed[place] ^= 1 << bit
        assert digest(changed) != digest(LARGE)


def test_exchanged_words_chunks_and_signs_change_the_digest():
    words = LARGE[: 2 * CHUNK_BYTES].view(torch.int64)
    swapped = words.clone()
    swapped[[1, 2]] = words[[2, 1]]
    negated = LARGE[: 2 * CHUNK_BYTES].clone()
    negated[3::4] ^= 0x80
    variants = [words, swapped, words.view(2, -1).flip(0).reshape(-1), negated.view(torch.int64)]
    assert len({digest(variant.view(torch.uint8)) for variant in variants}) == len(variants)


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16, 4096])
def test_changed_signs_in_every_lane_change_the_digest(stride):
    whole = LARGE[:CHUNK_BYTES]
    digests = {digest(whole)}
    for lane in range(min(stride, 8)):
        changed = whole.clone()
        changed[lane::stride] ^= 0x80
        digests.add(digest(changed))
    assert len(digests) == min(stride, 8) + 1


def test_two_flips_of_any_bits_change_the_sums():
    words = LARGE[:CHUNK_BYTES].view(torch.int64).clone()
    places = [0, 5, CHUNK_BYTES // 8 - 1]
    before, changes = weighted_sums(words), []
    for place in places:
        for bit in range(64):
            mask = -(1 << 63) if bit == 63 else 1 << bit
            words[place] ^= mask
            changes.append(weighted_sums(words) - before)
            words[place] ^= mask
    by_flip = torch.cat(changes)  # the sums are linear: two flips in different words change them by the sum of both
    missed = (by_flip[:, None] + by_flip[None] == 0).all(2)
    assert not missed.any()
    assert by_flip.any(1).all()
