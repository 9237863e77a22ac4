"""The seed of a sample, for what surrounds the model: episodes of environments, agent programs."""

from __future__ import annotations

import struct

import blake3

from rljob.protocol.runner_protocol import LeaseTrajectory


def sample_seed(job_seed: int, lease: LeaseTrajectory) -> int:
    """Return a seed below 2**52: the same when a loop runs again, another for each sample and each attempt."""
    key = struct.pack("<QQ", job_seed, lease.attempt) + lease.sample.encode()
    return int.from_bytes(blake3.blake3(key).digest(8), "little") >> 12
