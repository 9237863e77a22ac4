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
    """Join the records of a sample into one sequence.

    Args:
        records: records of the sample, in order; an interrupted turn has several.
        turn_rewards: one reward for each turn.
    """
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    segments: list[Segment] = []
    spans: list[VersionSpan] = []
    turn, end = -1, 0
    for record in records:
        begin = end + len(record.given) // INT32
        if record.turn != turn:
            turn = record.turn
            if begin > end:
                segments.append(Segment("observation" if turn else "prompt", end, begin))
            segments.append(Segment("model", begin, begin, turn_rewards[turn]))
        tokens += record.given, record.token_ids
        logprobs += bytes(len(record.given)), record.logprobs
        segments[-1].end = end = begin + len(record.token_ids) // INT32
        spans += [VersionSpan(s.version, begin + s.start, begin + s.end) for s in record.spans]
    sample = SampleTokens(records[0].sample, b"".join(tokens), b"".join(logprobs), segments, spans)
    assert len(sample.token_ids) == len(sample.logprobs) == INT32 * end
    return sample
