"""Wire format of weights, the same on both sides of a weight group.

Tensors travel in the order of their metadata as one uint8 stream: each contiguous, little-endian, nothing between
them. A bucket is the run of whole tensors that first reaches ``bucket_bytes``; the last one may be shorter. One
bucket is one broadcast. The digest is blake3 over the buckets in order (hex), so it does not depend on the cuts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob.protocol.messages import ParameterMeta

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameter_bytes(meta: ParameterMeta) -> int:
    """Return the bytes of one tensor on the wire."""
    return math.prod(meta.shape) * DTYPE_BYTES[meta.dtype]


def plan_buckets(parameters: Sequence[ParameterMeta], bucket_bytes: int) -> list[range]:
    """Return the buckets as ranges of indices into ``parameters``."""
    buckets, start, filled = [], 0, 0
    for i, meta in enumerate(parameters):
        filled += parameter_bytes(meta)
        if filled >= bucket_bytes:
            buckets.append(range(start, i + 1))
            start, filled = i + 1, 0
    if start < len(parameters):
        buckets.append(range(start, len(parameters)))
    return buckets
