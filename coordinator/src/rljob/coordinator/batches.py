"""Shards of a batch: the tokens of the samples that a rank requests, read from the payload."""

from __future__ import annotations

from threading import Lock

import msgspec
import zstandard

from rljob.ledger.payload_record import INT32, PayloadRecord, decode_logprobs, decode_record
from rljob.ledger.queries import StoredSample, stored_samples_of_batch
from rljob.ledger.store import Store
from rljob.protocol.batch_samples import SampleTokens, Segment
from rljob.protocol.branches import TurnKey, order
from rljob.protocol.model_logprobs import sequences_of
from rljob.protocol.shards import decode_selection
from rljob.protocol.shared_messages import VersionSpan

COMPRESSION = -5
"""zstd's level: it only finds repetitions. Higher levels take more time for each byte that they save than a network of
1 Gbit/s: log-probabilities hardly shrink."""

_rewards_decoder = msgspec.json.Decoder(list[float])
_encoder = msgspec.msgpack.Encoder()


class BatchShards:
    """Shards of the batches of a run. Every rank requests its own, so what the ledger has of the newest batch is kept:
    a batch that is formed does not change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading = Lock()
        self._newest: tuple[int, list[StoredSample]] = (-1, [])

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
        stored = self._stored(step)
        if not stored:
            raise LookupError(f"there is no batch {step}")
        read = self._store.segments.read
        samples = []
        for turn_rewards, locations, logprobs in (stored[i] for i in decode_selection(selection, len(stored))):
            records = [decode_record(read(location)) for location in locations]
            sample = assemble(records, _rewards_decoder.decode(turn_rewards))
            sample.models = {role: decode_logprobs(read(location)).logprobs for role, location in logprobs.items()}
            samples.append(sample)
        return zstandard.ZstdCompressor(level=COMPRESSION).compress(_encoder.encode(samples))

    def _stored(self, step: int) -> list[StoredSample]:
        with self._reading:  # the ranks request at the same time, and one of them reads
            newest, stored = self._newest
            if newest != step:
                stored = stored_samples_of_batch(self._store, step)
                if stored:
                    self._newest = step, stored
            return stored


def assemble(records: list[PayloadRecord], turn_rewards: list[float]) -> SampleTokens:
    """Join the records of a sample into its sequences, one after the other.

    Args:
        records: records of the sample, in order of time; an interrupted turn has several.
        turn_rewards: one reward for each turn, in the order of :func:`rljob.protocol.branches.order`.
    """
    if len(records) == 1 and records[0].turn == 0:
        return of_record(records[0], *turn_rewards)
    return of_records(records, turn_rewards)


def of_records(records: list[PayloadRecord], turn_rewards: list[float]) -> SampleTokens:
    """Return the sequences of a sample with any records; see :func:`assemble`."""
    turns: dict[TurnKey, list[PayloadRecord]] = {}
    for record in records:
        turns.setdefault((record.turn, record.branch), []).append(record)
    rewards = dict(zip(sorted(turns, key=order), turn_rewards, strict=True))
    sample = _Sequences()
    for keys in sequences_of(turns):
        for key, is_new in keys:
            sample.add(key, turns[key], rewards[key], again=not is_new)
        sample.end_sequence()
    tokens = SampleTokens(
        records[0].sample,
        b"".join(sample.tokens),
        b"".join(sample.logprobs),
        sample.segments,
        sample.spans,
        sample.ends if len(sample.ends) > 1 else [],
    )
    assert len(tokens.token_ids) == len(tokens.logprobs) == INT32 * sample.length
    return tokens


def of_record(record: PayloadRecord, reward: float) -> SampleTokens:
    """Return the only sequence of a sample with one record, as :func:`of_records` does, at a sixth of the time."""
    prompt, end = len(record.given) // INT32, (len(record.given) + len(record.token_ids)) // INT32
    model = Segment("model", prompt, end, reward)
    tokens = SampleTokens(
        record.sample,
        record.given + record.token_ids,
        bytes(len(record.given)) + record.logprobs,
        [Segment("prompt", 0, prompt), model] if prompt else [model],
        [VersionSpan(span.version, prompt + span.start, prompt + span.end) for span in record.spans],
    )
    assert len(tokens.token_ids) == len(tokens.logprobs) == INT32 * end
    return tokens


class _Sequences:
    """The sequences of a sample so far. Turns that an earlier sequence has are a prefix, which is not trained again."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.logprobs: list[bytes] = []
        self.segments: list[Segment] = []
        self.spans: list[VersionSpan] = []
        self.ends: list[int] = []
        self.length = 0

    def add(self, key: TurnKey, records: list[PayloadRecord], reward: float, again: bool) -> None:
        """Append a turn to the sequence; ``again``: an earlier sequence has it."""
        for number, record in enumerate(records):
            begin = self.length + len(record.given) // INT32
            end = begin + len(record.token_ids) // INT32
            if again:
                self._prefix(end)
            elif number == 0:
                if begin > self.length:
                    self.segments.append(Segment("observation" if key[0] else "prompt", self.length, begin))
                self.segments.append(Segment("model", begin, end, reward))
            self.segments[-1].end = self.length = end
            self.tokens += record.given, record.token_ids
            self.logprobs += bytes(len(record.given)), bytes(len(record.token_ids)) if again else record.logprobs
            if not again:
                self.spans += [VersionSpan(s.version, begin + s.start, begin + s.end) for s in record.spans]

    def end_sequence(self) -> None:
        """Begin another sequence with the next turn."""
        self.ends.append(self.length)

    def _prefix(self, end: int) -> None:
        if not (self.segments and self.segments[-1].kind == "prefix" and self.segments[-1].end == self.length):
            self.segments.append(Segment("prefix", self.length, end))
