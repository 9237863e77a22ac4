"""Tokens of a batch, shard by shard, read back from the payload."""

from __future__ import annotations

import msgspec
import zstandard

from rljob.ledger.payload_record import INT32, PayloadRecord
from rljob.ledger.queries import batch, completions
from rljob.ledger.store import Store
from rljob.protocol.messages import SampleTokens, VersionSpan
from rljob.scheduling.shards import assign


def shard(store: Store, step: int, rank: int, ranks: int) -> bytes:
    """Return zstd(msgpack(list[SampleTokens])) of the samples of batch ``step`` that ``rank`` trains.

    Raises:
        LookupError: there is no such batch.
        PayloadError: a record is damaged.
    """
    rows = batch(store, step)
    if not rows:
        raise LookupError(f"there is no batch {step}")
    mine = assign([row.prompt_tokens + row.response_tokens for row in rows], ranks)[rank]
    samples = [assemble(completions(store, rows[i].sample, rows[i].attempt)) for i in mine]
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(samples))


def assemble(records: list[PayloadRecord]) -> SampleTokens:
    """Join a sample's records into one sequence. A turn's context begins with everything before it."""
    tokens, logprobs, mask = b"", b"", b""
    spans: list[VersionSpan] = []
    turn = -1
    for record in records:
        if record.turn != turn:
            turn = record.turn
            assert record.prompt.startswith(tokens), f"{record.sample}: turn {turn} does not continue the one before"
            given = (len(record.prompt) - len(tokens)) // INT32
            tokens = record.prompt
            logprobs += bytes(4 * given)
            mask += bytes(given)
        begin = len(tokens) // INT32
        written = len(record.token_ids) // INT32
        tokens += record.token_ids
        logprobs += record.logprobs
        mask += b"\x01" * written
        spans += [VersionSpan(s.version, begin + s.start, begin + s.end) for s in record.spans]
    assert len(tokens) == len(logprobs) == INT32 * len(mask)
    return SampleTokens(records[0].sample, tokens, logprobs, mask, spans)
