"""Wire format of weights, the same on both sides of a weight group.

A group consists of one sender (rank 0) and the workers of one engine. The workers connect to the port of the sender,
and both ends prove that they know the nonce ``group`` (``rljob.transfer.handshake``). Once gloo or NCCL has connected
the members, they prove it again over its connections (``rljob.transfer.membership``). A round in a group consists of:

1. The buckets, each one broadcast from rank 0. Tensors are sent in the order of their metadata as one uint8 stream,
   contiguous, little-endian, without padding. A bucket is the run of whole tensors that first reaches
   ``bucket_bytes``; the last one may be shorter.
2. The 32 bytes of the sender's digest, broadcast from rank 0. A worker whose own digest differs ends the update with an
   error, before the engine uses the weights.
3. Receipts: each worker, in the order of ranks, broadcasts the 32 bytes of its own digest. Without them a sender could
   not distinguish received bytes from bytes in the socket of a crashed worker.

The digest is blake3 over one string for each tensor, in order, so it does not depend on the bucket boundaries. The
string is two numbers for each whole chunk of CHUNK_BYTES of the tensor, and then the remaining bytes as they are.
The numbers are sums modulo 2**64, of the chunk's 64-bit words and of the words' high halves as signed integers, the
i-th (from 1) multiplied by splitmix64(i) | 1; ``rljob.transfer.checksum`` has the code. The sums detect every change
within one word. They miss any change of several words with a probability of at most 2**-32, over random odd weights in
place of the fixed ones: the numbers determine the weighted sums of the low halves and of the high halves, and a half
changes by less than 2**32, so at least 32 bits of one of these sums are random. The second number is necessary: the
highest bits of a word meet only the lowest bits of its weight, so a sum of words alone does not detect two changed
signs. Words and numbers are little-endian. Messages contain the digest as hex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob.api.memory_plan import DTYPE_BYTES
from rljob.protocol.shared_messages import ParameterMeta

CHUNK_BYTES = 1 << 20


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
