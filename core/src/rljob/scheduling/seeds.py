"""Sampling seeds."""

from __future__ import annotations

import blake3


def derive(run_seed: int, sample: str, turn: int, attempt: int, branch: str = "") -> int:
    """Return the seed (< 2**63) of one attempt at one turn of a branch of a sample.

    A continuation from a prefix is a new attempt: with the same seed, an engine would restart its random stream from
    the beginning.
    """
    of_branch = f"/{branch}" if branch else ""
    key = f"{run_seed}/{sample}/{turn}/{attempt}{of_branch}".encode()
    return int.from_bytes(blake3.blake3(key).digest(8), "little") >> 1
