"""Wire format of weights, the same on both sides of a weight group.

A group consists of one sender (rank 0) and the workers of one engine. The workers connect to the port of the sender,
and both ends prove that they know the nonce ``group`` (``rljob.transfer.handshake``). Once gloo or NCCL has connected
the members, they prove it again over its connections (``rljob.transfer.membership``). A round in a group consists of:

1. The buckets, each one broadcast from rank 0. Tensors are sent in the order of their metadata as one uint8 stream,
   contiguous, little-endian, without padding. A bucket is the run of whole tensors that first reaches
   ``bucket_bytes``; the last one may be shorter.
2. Receipts: each worker, in the order of ranks, broadcasts the 32 bytes of its digest once it has loaded everything.
   Without them a sender could not distinguish received bytes from bytes in the socket of a crashed worker.

The digest is blake3 over the buckets in order, so it does not depend on the bucket boundaries. Messages contain it as
hex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob.protocol.messages import ParameterMeta

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DIGEST_BYTES = 32


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
