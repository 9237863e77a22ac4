"""Answers that weight updates interrupt end where uninterrupted answers end."""

from __future__ import annotations

from array import array
from pathlib import Path

from e2e.fakes.harness import make_job, run_harness
from e2e.fakes.model import STOP, tokenizer
from rljob.ledger.audit import audit
from rljob.ledger.payload_record import PayloadRecord, decode_record
from rljob.ledger.reader import LedgerReader
from rljob.ledger.record_store import Location
from rljob.protocol.agent_protocol import SamplingParams
from rljob.rollout.answer_end import AnswerEnd

STOPS = ["a", "e", "Q", "x1", "7"]
LEAST = 4


def answers(storage: Path) -> dict[tuple[str, int], list[PayloadRecord]]:
    """Return the records of each turn."""
    found: dict[tuple[str, int], list[PayloadRecord]] = {}
    with LedgerReader(storage) as ledger:
        for row in ledger.rows("SELECT * FROM completions ORDER BY sample, turn, attempt"):
            at = Location(row["segment"], row["position"], row["length"])
            found.setdefault((row["sample"], row["turn"]), []).append(decode_record(ledger.payload.read(at)))
    return found


async def test_interrupted_answers_end_where_uninterrupted_ones_do(tmp_path: Path) -> None:
    job = make_job(
        training={"steps": 6, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 2},
        weightSync={"inFlight": "abort"},
        checkpoints={"everySteps": 100},
    )
    for task in job.spec.tasks:
        task.sampling.stop, task.sampling.min_tokens = STOPS, LEAST
    async with run_harness(job, tmp_path, seconds_per_token=0.002) as harness:
        await harness.trainer().run()
    assert audit(tmp_path).ok
    seams = 0
    for records in answers(tmp_path).values():
        if records[-1].finish == "abort":
            continue
        tokens = [token for record in records for token in array("i", record.token_ids)]
        end = AnswerEnd(SamplingParams(1.0, 1, [STOP], 0, STOPS, LEAST), tokens, tokenizer)
        ends = [end.is_at(token) for token in tokens]
        assert not any(ends[:-1]) and ends[-1] == (records[-1].finish == "stop"), tokens
        assert len(tokens) > LEAST or records[-1].finish == "length"
        seams += sum(len(record.token_ids) > 0 for record in records) > 1
    assert seams > 0, "no answer was interrupted"
