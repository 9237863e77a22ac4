"""Shards of a batch: the tokens of the samples that a rank requests, read from the payload."""

from __future__ import annotations

import json

import msgspec
import zstandard

from rljob.ledger.payload_record import INT32, PayloadRecord
from rljob.ledger.queries import batch, completions
from rljob.ledger.store import Store
from rljob.protocol.messages import SampleTokens, Segment, VersionSpan
from rljob.protocol.shards import decode_selection


def shard(store: Store, step: int, selection: bytes) -> bytes:
    """Return zstd(msgpack(list[SampleTokens])) of the selected samples of batch ``step``.

    Args:
        store: the ledger.
        step: of the batch.
        selection: see :mod:`rljob.protocol.shards`.

    Raises:
        LookupError: the batch does not exist.
        SelectionError: the selection does not fit the batch.
        PayloadError: a record is damaged.
    """
    rows = batch(store, step)
    if not rows:
        raise LookupError(f"there is no batch {step}")
    samples = [
        assemble(completions(store, row.sample, row.attempt), json.loads(row.turn_rewards))
        for row in (rows[i] for i in decode_selection(selection, len(rows)))
    ]
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(samples))


def assemble(records: list[PayloadRecord], turn_rewards: list[float]) -> SampleTokens:
    """Join the records of a sample into one sequence. The context of a turn starts with all previous tokens.

    Args:
        records: records of the sample, in order; an interrupted turn has several.
        turn_rewards: one reward for each turn.
    """
    tokens, logprobs = b"", b""
    segments: list[Segment] = []
    spans: list[VersionSpan] = []
    turn = -1
    for record in records:
        begin = len(tokens) // INT32
        if record.turn != turn:
            turn = record.turn
            assert record.prompt.startswith(tokens), f"{record.sample}: turn {turn} does not continue the previous turn"
            logprobs += bytes(len(record.prompt) - len(tokens))
            tokens = record.prompt
            added, begin = begin, len(tokens) // INT32
            if begin > added:
                segments.append(Segment("observation" if turn else "prompt", added, begin))
            segments.append(Segment("model", begin, begin, turn_rewards[turn]))
        tokens += record.token_ids
        logprobs += record.logprobs
        segments[-1].end = len(tokens) // INT32
        spans += [VersionSpan(s.version, begin + s.start, begin + s.end) for s in record.spans]
    assert len(tokens) == len(logprobs) == INT32 * segments[-1].end
    return SampleTokens(records[0].sample, tokens, logprobs, segments, spans)
