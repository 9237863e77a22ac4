"""Every completion that was not unlinked has its payload, which is what the ledger says."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Iterator
from itertools import groupby

import msgspec

from rljob.ledger.audit_report import Check, Findings
from rljob.ledger.payload_record import INT32, PayloadRecord, decode_record, payload_digest
from rljob.ledger.queries import first_needed_segment
from rljob.ledger.reader import LedgerReader
from rljob.ledger.segments import HEADER, Location, PayloadError

COMPLETIONS = """
SELECT c.*, s.attempt AS first_attempt, s.prompt_tokens, s.total_tokens, s.min_version, s.max_version,
    s.finish AS ended, s.state
FROM completions c JOIN samples s ON s.id = c.sample ORDER BY c.sample, c.turn, c.attempt
"""


def examine_payload(ledger: LedgerReader) -> Check:
    """Read every record that is there. One sample's records are in memory at a time."""
    findings = Findings("payload is there as it was written")
    sizes = {segment: ledger.payload.path(segment).stat().st_size for segment in ledger.payload.segments()}
    _examine_segments(ledger, set(sizes), findings)
    for sample, rows in groupby(ledger.db.execute(COMPLETIONS), key=lambda row: row["sample"]):
        counted: list[tuple[sqlite3.Row, PayloadRecord | None]] = []
        for row in rows:
            record = None
            if row["segment"] in sizes:
                findings.examined += 1
                record = _read(ledger, row, sizes[row["segment"]], findings)
            if row["attempt"] >= row["first_attempt"]:
                counted.append((row, record))
        for broken in _contradictions(counted):
            findings.add(broken, f"sample {sample}")
    return findings.check()


def _examine_segments(ledger: LedgerReader, present: set[int], findings: Findings) -> None:
    """Segments go from the oldest on, once checkpoints cover them; any other that is missing is lost."""
    referred = [row[0] for row in ledger.rows("SELECT DISTINCT segment FROM completions ORDER BY segment")]
    missing = [segment for segment in referred if segment not in present]
    if not missing:
        return
    with LedgerReader(ledger.storage) as now:  # the run may have gone on and unlinked more
        kept = now.value("SELECT COALESCE(MIN(step), 0) FROM checkpoints WHERE removed = 0")
        needed = first_needed_segment(now.rows, kept)
    oldest = min(present, default=referred[-1])
    for segment in missing:
        unlinked = 0 <= segment < min(oldest, referred[-1]) and (needed is None or segment < needed)
        if not unlinked:
            findings.add("the ledger refers to it, but it does not exist", f"segment {segment}")


def _read(ledger: LedgerReader, row: sqlite3.Row, size: int, findings: Findings) -> PayloadRecord | None:
    """Return a record that is as the ledger says, None otherwise."""
    who = f"completion {row['sample']}/{row['turn']}/{row['attempt']}"
    if row["position"] < 0 or row["length"] < 0 or row["position"] + HEADER.size + row["length"] > size:
        if row["segment"] in ledger.payload.segments():  # else it was unlinked a moment ago
            findings.add("its payload is beyond the end of its segment", who)
        return None
    try:
        payload = ledger.payload.read(Location(row["segment"], row["position"], row["length"]))
        record = decode_record(payload)
    except PayloadError:
        if row["segment"] in ledger.payload.segments():
            findings.add("its payload is damaged, or not where the ledger says", who)
        return None
    except msgspec.MsgspecError:
        findings.add("its payload is no record of a completion", who)
        return None
    if payload_digest(payload) != row["digest"]:
        findings.add("its payload has another digest than the ledger says", who)
    said = (row["sample"], row["turn"], row["attempt"], row["finish"], row["tokens"])
    if said != (record.sample, record.turn, record.attempt, record.finish, len(record.token_ids) / INT32):
        findings.add("its payload is of another completion, or has another finish or number of tokens", who)
    if not _sound(record):
        findings.add("its log-probabilities or versions do not cover its tokens, or are not finite", who)
    return record


def _sound(record: PayloadRecord) -> bool:
    tokens, at = len(record.token_ids) // INT32, 0
    for span in record.spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    if at != tokens or len(record.logprobs) != len(record.token_ids) or len(record.prompt) % INT32:
        return False
    return all(math.isfinite(logprob) for logprob in array("f", record.logprobs))


def _contradictions(counted: list[tuple[sqlite3.Row, PayloadRecord | None]]) -> Iterator[str]:
    """Yield what a sample's row says otherwise than the completions that count."""
    if not counted:
        return
    (_, first), (row, last) = counted[0], counted[-1]
    if row["ended"] != row["finish"]:
        yield "it ended otherwise than its last completion"
    if first is not None and row["prompt_tokens"] != len(first.prompt) // INT32:
        yield "its prompt does not have as many tokens as the ledger says"
    if last is not None:
        written = sum(completion["tokens"] for completion, _ in counted if completion["turn"] == row["turn"])
        if row["total_tokens"] != len(last.prompt) // INT32 + written:
            yield "its sequence does not have as many tokens as the ledger says"
    records = [record for _, record in counted if record is not None]
    if len(records) < len(counted):
        return
    if not _continuous(records):
        yield "a turn does not continue the one before it"
    versions = [span.version for record in records for span in record.spans]
    if not versions or row["min_version"] is None or row["max_version"] is None:
        return
    silent = any(not record.spans and record.finish != "abort" for record in records)  # their version is not in it
    exact = (row["min_version"], row["max_version"]) == (min(versions), max(versions))
    around = row["min_version"] <= min(versions) and max(versions) <= row["max_version"]
    if not (exact or (silent and around)):
        yield "its tokens are of other versions than the ledger says"


def _continuous(records: list[PayloadRecord]) -> bool:
    written, turn = b"", -1
    for record in records:
        if record.turn != turn:
            if not record.prompt.startswith(written):
                return False
            turn, written = record.turn, record.prompt
        elif record.prompt != written[: len(record.prompt)]:
            return False
        written += record.token_ids
    return True
