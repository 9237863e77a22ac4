"""Checks that every completion whose payload is not unlinked has a payload record that matches the ledger."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TypeVar

import msgspec

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.payload_record import (
    INT32,
    PayloadRecord,
    decode_logprobs,
    decode_record,
    decode_text,
    payload_digest,
)
from rljob.ledger.queries import first_needed_segment
from rljob.ledger.reader import LedgerReader
from rljob.ledger.record_store import Location, PayloadError
from rljob.ledger.sample_numbers import sample_id
from rljob.ledger.segments import HEADER
from rljob.protocol.branches import TurnKey, before, check_turn, last_turns
from rljob.protocol.contexts import GrowingDigest

Value = TypeVar("Value")

COMPLETIONS = """
SELECT c.number, c.sample_number, c.sample, c.turn, c.branch, c.attempt, c.finish, c.tokens, c.digest, c.segment,
    c.position, c.length, c.total_tokens AS own_total, c.min_version AS own_min, c.max_version AS own_max,
    s.attempt AS first_attempt, s.prompt_tokens, s.total_tokens, s.sequences, s.min_version, s.max_version,
    s.finish AS ended
FROM completions c JOIN samples s ON s.number = c.sample_number ORDER BY c.sample_number, c.number
"""

SEGMENTS = "SELECT segment FROM completions UNION SELECT segment FROM model_logprobs ORDER BY segment"
LOGPROBS = """
SELECT m.*, s.response_tokens FROM model_logprobs m JOIN samples s ON s.number = m.sample_number
"""


def examine_payload(ledger: LedgerReader) -> Check:
    """Check every existing payload record. Only the records of one sample are in memory at a time."""
    findings = Findings("every payload record exists and is unchanged")
    sizes = {segment: ledger.payload.path(segment).stat().st_size for segment in ledger.payload.segments()}
    _examine_segments(ledger, set(sizes), findings)
    for number, rows in groupby(ledger.db.execute(COMPLETIONS), key=lambda row: row["sample_number"]):
        counted: list[tuple[sqlite3.Row, PayloadRecord | None]] = []
        for row in rows:
            record = None
            if row["segment"] in sizes:
                findings.examined += 1
                record = _read(ledger, row, sizes[row["segment"]], findings)
            if row["attempt"] >= row["first_attempt"]:
                counted.append((row, record))
        for problem in _mismatches(counted):
            findings.add(problem, f"sample {sample_id(number)}")
    _examine_logprobs(ledger, sizes, findings)
    return findings.check()


def examine_texts(ledger: LedgerReader) -> Check:
    """Check the text of every sample with a reward, and of every answer of a frozen pool."""
    findings = Findings("every text exists and is unchanged")
    for number, *place in ledger.db.execute(
        "SELECT sample_number, text_segment, text_position, text_length FROM scores"
        " UNION ALL SELECT sample_number, segment, position, length FROM answers"
    ):
        findings.examined += 1
        sample = sample_id(number)
        if None in place or place[1] < 0 or place[2] < 0:
            findings.add("its text has no valid place", f"sample {sample}")
            continue
        try:
            record = decode_text(ledger.texts.read(Location(*place)))
        except (PayloadError, msgspec.MsgspecError):
            findings.add("its text is missing or damaged, or not at the recorded position", f"sample {sample}")
            continue
        if record.sample != sample:
            findings.add("its text is that of another sample", f"sample {sample}")
    return findings.check()


def _examine_logprobs(ledger: LedgerReader, sizes: Mapping[int, int], findings: Findings) -> None:
    """Check the log-probabilities of samples under models of frozen pools."""
    for row in ledger.db.execute(LOGPROBS):
        if row["segment"] not in sizes:
            continue
        findings.examined += 1
        name = f"the model {row['role']} of sample {sample_id(row['sample_number'])}"
        try:
            payload = ledger.payload.read(Location(row["segment"], row["position"], row["length"]))
            record = decode_logprobs(payload)
        except (PayloadError, msgspec.MsgspecError):
            if row["segment"] in ledger.payload.segments():  # else it was unlinked meanwhile
                findings.add("its log-probabilities are damaged, or not at the recorded position", name)
            continue
        own = (sample_id(row["sample_number"]), row["role"], INT32 * (row["response_tokens"] or 0))
        if (record.sample, record.role, len(record.logprobs)) != own:
            findings.add("its log-probabilities are those of another sample, model or number of tokens", name)
        if payload_digest(payload) != row["digest"]:
            findings.add("the digest of its log-probabilities differs from the ledger", name)


def _examine_segments(ledger: LedgerReader, present: set[int], findings: Findings) -> None:
    """Report lost segments. Covered segments are unlinked oldest first; any other missing segment is lost."""
    referred = [row[0] for row in ledger.rows(SEGMENTS)]
    missing = [segment for segment in referred if segment not in present]
    if not missing:
        return
    with LedgerReader(ledger.storage) as now:  # the run may have unlinked more segments since
        kept = now.value("SELECT COALESCE(MIN(step), 0) FROM checkpoints WHERE removed = 0")
        needed = first_needed_segment(now.rows, kept)
    oldest = min(present, default=referred[-1])
    for segment in missing:
        unlinked = 0 <= segment < min(oldest, referred[-1]) and (needed is None or segment < needed)
        if not unlinked:
            findings.add("the ledger refers to it, but the file does not exist", f"segment {segment}")


def _read(ledger: LedgerReader, row: sqlite3.Row, size: int, findings: Findings) -> PayloadRecord | None:
    """Return a completion's record, after comparing it with the ledger; None if it cannot be read."""
    name = f"completion {row['sample']}/{row['turn']}/{row['attempt']}"
    if row["position"] < 0 or row["length"] < 0 or row["position"] + HEADER.size + row["length"] > size:
        if row["segment"] in ledger.payload.segments():  # else it was unlinked meanwhile
            findings.add("its payload is beyond the end of its segment", name)
        return None
    try:
        payload = ledger.payload.read(Location(row["segment"], row["position"], row["length"]))
        record = decode_record(payload)
    except PayloadError:
        if row["segment"] in ledger.payload.segments():
            findings.add("its payload is damaged, or not at the recorded position", name)
        return None
    except msgspec.MsgspecError:
        findings.add("its payload is not a completion record", name)
        return None
    if payload_digest(payload) != row["digest"]:
        findings.add("the digest of its payload differs from the ledger", name)
    recorded = (row["sample"], row["turn"], row["branch"], row["attempt"], row["finish"], row["tokens"])
    own = (record.sample, record.turn, record.branch, record.attempt, record.finish, len(record.token_ids) / INT32)
    if recorded != own:
        findings.add("its payload has another completion id, finish or number of tokens", name)
    if not _is_consistent(record):
        findings.add("its log-probabilities or versions do not cover its tokens, or are not finite", name)
    return record


def _is_consistent(record: PayloadRecord) -> bool:
    tokens, at = len(record.token_ids) // INT32, 0
    for span in record.spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    if at != tokens or len(record.logprobs) != len(record.token_ids) or len(record.given) % INT32:
        return False
    return all(math.isfinite(logprob) for logprob in array("f", record.logprobs))


def _mismatches(counted: list[tuple[sqlite3.Row, PayloadRecord | None]]) -> Iterator[str]:
    """Yield a message for each difference between a sample's row and its counted completions."""
    if not counted:
        return
    (_, first), (row, _) = counted[0], counted[-1]
    if row["ended"] != row["finish"]:
        yield "its finish differs from that of its last completion"
    if first is not None and row["prompt_tokens"] != len(first.given) // INT32:
        yield "the number of tokens of its prompt differs from the ledger"
    keys = [(row["turn"], row["branch"]) for row, _ in counted]
    if not _continue_each_other(keys):
        yield "a turn of one of its branches does not continue an earlier turn"
        return
    records = [record for _, record in counted if record is not None]
    if len(records) < len(counted):
        return
    lengths = _sequence_lengths(records)
    recorded = [row["total_tokens"]] if row["sequences"] is None else msgspec.json.decode(row["sequences"])
    if recorded != lengths or row["total_tokens"] != sum(lengths):
        yield "the number of tokens of its sequence differs from the ledger"
    if not _counts_agree(counted):
        yield "the length or the versions of one of its completions differ from the ledger"
    if not _generated_from_their_contexts(records):
        yield "a completion was generated from other tokens than the context of its turn"
    versions = [span.version for record in records for span in record.spans]
    if not versions or row["min_version"] is None or row["max_version"] is None:
        return
    # The version of a completion without tokens is not in its record.
    unversioned = any(not record.spans and record.finish != "abort" for record in records)
    exact = (row["min_version"], row["max_version"]) == (min(versions), max(versions))
    within = row["min_version"] <= min(versions) and max(versions) <= row["max_version"]
    if not (exact or (unversioned and within)):
        yield "the versions of its tokens differ from the ledger"


def _counts_agree(counted: list[tuple[sqlite3.Row, PayloadRecord | None]]) -> bool:
    """Return whether length and versions in the rows of a sample's completions are those of its records so far."""
    lowest: list[int] = []
    tokens: dict[TurnKey, int] = {}  # after each turn so far
    for row, record in counted:
        assert record is not None
        key = (record.turn, record.branch)
        written = tokens[key] = _so_far(tokens, key, 0) + len(record.given) // INT32 + row["tokens"]
        versions = [span.version for span in record.spans]
        if row["own_total"] != written:
            return False
        if not versions and record.finish != "abort":
            return True  # it has the version of its engine, which is not in its record
        lowest += versions
        if row["own_min"] != min(lowest, default=None) or row["own_max"] != max(versions, default=-1):
            return False
    return True


def _generated_from_their_contexts(records: list[PayloadRecord]) -> bool:
    digests: dict[TurnKey, GrowingDigest] = {}  # after each turn so far
    for record in records:
        key = (record.turn, record.branch)
        known = digests.get(key)
        digest = digests[key] = known or _so_far(digests, key, GrowingDigest()).copy()
        digest.append(record.given)
        if record.context != digest.digest():
            return False
        digest.append(record.token_ids)
    return True


def _continue_each_other(keys: list[TurnKey]) -> bool:
    """Return whether each turn, in order of time, has a valid branch and continues a turn before it."""
    known: set[TurnKey | None] = {None}
    for key in keys:
        try:
            check_turn(*key)
        except ValueError:
            return False
        if before(key) not in known:
            return False
        known.add(key)
    return True


def _sequence_lengths(records: list[PayloadRecord]) -> list[int]:
    tokens: dict[TurnKey, int] = {}  # after each turn
    for record in records:
        key = (record.turn, record.branch)
        tokens[key] = _so_far(tokens, key, 0) + (len(record.given) + len(record.token_ids)) // INT32
    ends: dict[str, int] = {}
    for turn, branch in tokens:
        ends[branch] = max(turn, ends.get(branch, 0))
    return [tokens[key] for key in last_turns((turn, branch) for branch, turn in ends.items())]


def _so_far(found: Mapping[TurnKey, Value], key: TurnKey, start: Value) -> Value:
    """Return the value of a turn, else that of the turn that it continues; at the beginning of tokens ``start``."""
    if key in found:
        return found[key]
    earlier = before(key)
    return start if earlier is None else found[earlier]
