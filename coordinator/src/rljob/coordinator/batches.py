"""Shards of a batch: the tokens of the samples that a rank requests, read from the payload."""

from __future__ import annotations

import json
from threading import Lock

import msgspec
import zstandard

from rljob.ledger.payload_record import INT32, PayloadRecord, decode_record
from rljob.ledger.queries import BatchRow, batch, locations_of_batch
from rljob.ledger.segments import Location
from rljob.ledger.store import Store
from rljob.protocol.messages import SampleTokens, Segment, VersionSpan
from rljob.protocol.shards import decode_selection


class BatchShards:
    """Shards of the batches of a run. Every rank requests its own, so what the ledger has of the newest batch is kept:
    a batch that is formed does not change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading = Lock()
        self._newest: tuple[int, list[tuple[BatchRow, list[Location]]]] = (-1, [])

    def shard(self, step: int, selection: bytes) -> bytes:
        """Return zstd(msgpack(list[SampleTokens])) of the selected samples of batch ``step``. Any thread may call it.

        Args:
            step: of the batch.
            selection: see :mod:`rljob.protocol.shards`.

        Raises:
            LookupError: the batch does not exist.
            SelectionError: the selection does not fit the batch.
            PayloadError: a record is damaged.
        """
        rows = self._rows(step)
        if not rows:
            raise LookupError(f"there is no batch {step}")
        samples = []
        for row, locations in (rows[i] for i in decode_selection(selection, len(rows))):
            records = [decode_record(self._store.segments.read(location)) for location in locations]
            samples.append(assemble(records, json.loads(row.turn_rewards)))
        return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(samples))

    def _rows(self, step: int) -> list[tuple[BatchRow, list[Location]]]:
        with self._reading:  # the ranks request at the same time, and one of them reads
            newest, rows = self._newest
            if newest != step:
                locations = locations_of_batch(self._store, step)
                rows = [(row, locations[row.sample]) for row in batch(self._store, step)]
                if rows:
                    self._newest = step, rows
            return rows


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
