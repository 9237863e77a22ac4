"""Restart of a coordinator: a million trained samples in the ledger, and 20,000 in flight with 500 tokens each.

The rows are written by a few SQL statements, as a run of that length takes an hour. The time is that from the start of
the process until it answers /healthz: it has then restored the run and listens for its peers.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import blake3

from benchmarks.coordinator_peers import Load
from benchmarks.process_counters import cpu_seconds
from rljob.ledger.payload_record import PayloadRecord, encode_record
from rljob.ledger.sample_numbers import MEMBER_BITS, sample_id
from rljob.ledger.segments import Segments
from rljob.ledger.store import LEDGER, PAYLOAD
from rljob.protocol.contexts import context_digest
from rljob.protocol.shared_messages import VersionSpan

MEMBERS = 8
STALENESS = 4
RESTART = Load(prompts=500, staleness=STALENESS, samples=1_000_000)
TOKENS = 500
METRICS = {
    "samples": RESTART.prompts * MEMBERS, "reward/mean": 0.5, "reward/std": 0.5, "staleness/mean": 1.0,
    "staleness/max": 1.0, "tokens_per_second": 1.0, "seconds": 1.0,
}  # fmt: skip
START_SECONDS = 120.0

TRAINED = f"""
CREATE TEMP TABLE numbers AS WITH RECURSIVE n(g) AS (SELECT 0 UNION ALL SELECT g + 1 FROM n WHERE g + 1 < :groups)
    SELECT g, value AS member, g << {MEMBER_BITS} | value AS sample, g / :prompts AS step
    FROM n, json_each('[0,1,2,3,4,5,6,7]') ORDER BY g, value;
"""
FILL = (
    "DELETE FROM groups",  # what the first start admitted
    "DELETE FROM samples",
    "DELETE FROM mixture",
    "INSERT INTO groups SELECT g, 'train', g, 'sums', g, MAX(0, step - :staleness), 0, MAX(0, step - :staleness),"
    " MAX(0, step - :staleness) * :prompts * 8, step >= :steps FROM numbers WHERE member = 0",
    "INSERT INTO samples (number) SELECT sample FROM numbers WHERE step >= :steps",
    "INSERT INTO samples SELECT sample, 0, 'trained', '', 0.5, '[0.5]', NULL, json_array(g * 8 + member + 1), 100,"
    " :tokens, 100 + :tokens, NULL, step, step, 'stop', NULL, '{\"accuracy\":1.0}', 0, 0, 2031, step, 0.0 FROM numbers"
    " WHERE step < :steps",
    "INSERT INTO completions SELECT g * 8 + member + 1, sample, 0, '', 0, 'stop', :tokens, 100 + :tokens, step, step,"
    " 'main-0.0', printf('%032d', 0), 0, 0, 4451 FROM numbers WHERE step < :steps",
    "INSERT INTO applied SELECT DISTINCT step, 1, '{}', step FROM numbers WHERE step < :steps",
    "INSERT INTO batches SELECT step, step, COUNT(DISTINCT g), json_group_array('g' || g || '.' || member)"
    " FROM numbers WHERE step < :steps GROUP BY step",
    "INSERT INTO step_metrics SELECT DISTINCT step, :metrics FROM numbers WHERE step < :steps",
    "INSERT INTO incarnations VALUES (1, 'trainer', 0, 0.0)",
    "INSERT INTO ended VALUES ('trained', :steps * :prompts * 8)",
    "INSERT INTO mixture VALUES ('sums', :groups, 0.0, 1.0, :groups - :steps * :prompts, 0.0, 0.0, 0)",
)


def fill(run: Path) -> int:
    """Write the samples to the ledger of a new run; return the number of those in flight."""
    steps = RESTART.samples // (RESTART.prompts * MEMBERS)
    groups = (steps + STALENESS + 1) * RESTART.prompts
    values = {
        "groups": groups, "prompts": RESTART.prompts, "staleness": STALENESS, "steps": steps, "tokens": TOKENS,
        "metrics": json.dumps(METRICS),
    }  # fmt: skip
    db = sqlite3.connect(run / LEDGER, isolation_level=None)
    db.execute("PRAGMA synchronous=OFF")
    db.execute("BEGIN")
    db.execute(TRAINED.strip().rstrip(";"), values)
    for statement in FILL:
        db.execute(statement, values)
    segments = Segments(run / PAYLOAD)
    rows = []
    for (number,) in db.execute("SELECT sample FROM numbers WHERE step >= ?", (steps,)).fetchall():
        spans = [VersionSpan(steps, 0, TOKENS)]
        sample, zeros = sample_id(number), bytes(4 * TOKENS)
        content = encode_record(
            PayloadRecord(sample, 0, 0, bytes(400), zeros, zeros, spans, "abort", context_digest(bytes(400)))
        )
        at = segments.append(content)
        digest = blake3.blake3(content).hexdigest(16)
        row = (number, 0, "", 0, "abort", TOKENS, 100 + TOKENS, steps, steps, "main-0.0", digest, *at)
        rows.append((steps * RESTART.prompts * MEMBERS + len(rows) + 1, *row))
    db.executemany(f"INSERT INTO completions VALUES (?{',?' * 14})", rows)
    segments.close()
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return len(rows)


def measure_restart(
    start: Callable[[Load, Path, int], subprocess.Popen[bytes]], directory: Path, port: int
) -> tuple[float, float, int, int]:
    """Return wall-clock and CPU seconds of a restart, the samples in flight, and the size of the ledger in bytes.

    Args:
        start: starts the coordinator of a load, in a directory and at a port.
        directory: empty.
        port: free.
    """
    _seconds_until_it_answers(start(RESTART, directory, port), port)
    in_flight = fill(directory / "run")
    size = (directory / "run" / LEDGER).stat().st_size
    wall, cpu = _seconds_until_it_answers(start(RESTART, directory, port), port)
    return wall, cpu, in_flight, size


def _seconds_until_it_answers(process: subprocess.Popen[bytes], port: int) -> tuple[float, float]:
    """Return wall-clock and CPU seconds since the start of a coordinator, and end it."""
    began = time.monotonic()
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=START_SECONDS):
                    return time.monotonic() - began, cpu_seconds(process.pid)
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise
                time.sleep(0.01)
    finally:
        process.terminate()
        process.wait()
