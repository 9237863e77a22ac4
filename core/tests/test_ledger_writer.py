"""The writes of the ledger: state transitions of samples, and results of the queries."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import pytest

from rljob.ledger import queries
from rljob.ledger.payload_record import PayloadRecord
from rljob.ledger.sample_numbers import sample_id
from rljob.ledger.states import OPEN, PREDECESSORS, REJECTED, Kind, State
from rljob.ledger.store import TransitionError
from rljob.ledger.writer import LedgerWriter
from rljob.protocol.shared_messages import VersionSpan


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[LedgerWriter]:
    """A ledger with a running commit task."""
    writer = LedgerWriter(tmp_path)
    committing = asyncio.create_task(writer.run())
    yield writer
    committing.cancel()
    writer.close()


@pytest.mark.parametrize(("before", "after"), product(State, State))
def test_a_sample_moves_forward_or_the_commit_fails(tmp_path: Path, before: State, after: State) -> None:
    ledger = LedgerWriter(tmp_path)
    ledger.admit_group("g0", Kind.TRAIN, 0, "sums", 0, 0, ["g0.0"], 0)
    ledger._commit(ledger._queue)
    ledger.db.execute("UPDATE samples SET state = ?", (before,))
    ledger._queue = []
    match after:
        case State.SCORED | State.EVALUATED:
            kind = Kind.TRAIN if after is State.SCORED else Kind.EVALUATION
            ledger.record_score("g0.0", kind, 1.0, [1.0], {}, "text")
        case State.BATCHED:
            ledger.record_batch(0, ["g0.0"])
        case State.ADMITTED:
            ledger.close()
            return  # no write returns a sample to its first state
        case _:
            ledger.end_samples(["g0.0"], after, "reason")
    allowed = before in PREDECESSORS[after]
    try:
        ledger._commit(ledger._queue)
        changed = True
    except TransitionError as error:
        changed = False
        assert "g0.0" in str(error)
    assert changed == allowed
    assert ledger.query("SELECT state FROM samples")[0][0] == (after if allowed else before)
    ledger.close()


def test_states_that_ended_have_no_successor() -> None:
    ended = set(State) - set(OPEN)
    assert set(REJECTED) | {State.TRAINED, State.BASELINE, State.EVALUATED} == ended
    assert not ended & {state for before in PREDECESSORS.values() for state in before}


async def test_a_write_to_a_sample_that_does_not_exist_ends_the_ledger(tmp_path: Path) -> None:
    ledger = LedgerWriter(tmp_path)
    committing = asyncio.create_task(ledger.run())
    ledger.end_samples(["g7.0"], State.FAILED, "reason")
    with pytest.raises(TransitionError, match="changed 0 rows"):
        await committing
    ledger.close()


async def test_open_groups_are_read_back_with_their_samples_and_completions(ledger: LedgerWriter) -> None:
    ledger.admit_group("g0", Kind.TRAIN, 0, "sums", 0, 0, ["g0.0", "g0.1"], 0)
    ledger.admit_group("g1", Kind.TRAIN, 1, "sums", 1, 0, ["g1.0"], 0)
    record = PayloadRecord("g0.0", 0, 0, bytes(8), bytes(12), bytes(12), [VersionSpan(3, 0, 3)], "stop", "")
    ledger.record_first_dispatch("g0", 3)
    ledger.record_completion(record, "engine-0", 3, 3, 3)
    ledger.discard_generation("g0.1", 2)
    ledger.record_dispatch_again("g0.1", 4)
    ledger.record_score("g1.0", Kind.TRAIN, 0.5, [0.5], {"length": 1.0}, "text")
    ledger.end_samples(["g1.0"], State.FILTERED, "equal rewards")
    await ledger.drain()
    (group,) = queries.open_groups(ledger)
    first, second = group.samples
    assert (group.id, group.seq, group.task, group.row, group.version) == ("g0", 0, "sums", 0, 0)
    assert (first.id, first.state, first.min_version, first.dispatched) == ("g0.0", State.ADMITTED, 3, 3)
    assert (second.id, second.attempt, second.min_version, second.dispatched) == ("g0.1", 2, None, 4)
    assert queries.completions(ledger, "g0.0", 0) == [record]
    assert queries.completions(ledger, "g0.0", 1) == []
    found = queries.admissions(ledger)
    assert (found.groups, found.batched, found.ends) == (2, 0, {State.FILTERED: 1})


async def test_the_mixture_has_the_newest_counters_of_every_task(ledger: LedgerWriter) -> None:
    other = queries.MixtureRecord(1, 0.0, 1.0, 1.0, 0.0, 0.0)
    ledger.record_mixture({"sums": queries.MixtureRecord(1, -0.5, 0.25, 2.0, 1.0, 7.0, 3), "other": other})
    newest = queries.MixtureRecord(4, -0.5, 0.25, 2.5, 1.0, 8.0, 4)
    ledger.record_mixture({"sums": newest})
    await ledger.drain()
    assert queries.mixture(ledger) == {"sums": newest, "other": other}


async def test_advantages_go_to_the_samples_of_their_batch_in_its_order(ledger: LedgerWriter) -> None:
    ledger.admit_group("g0", Kind.TRAIN, 0, "sums", 0, 0, ["g0.0", "g0.1"], 0)
    ledger.admit_group("g1", Kind.TRAIN, 1, "sums", 1, 0, ["g1.0"], 0)
    ledger.execute("INSERT INTO batches VALUES (0, 0, 2, ?)", '["g1.0", "g0.1"]')
    await ledger.drain()
    ledger.record_advantages(0, array("f", [-0.5, 1.5]).tobytes())
    ledger.record_advantages(0, b"")
    await ledger.drain()
    rows = ledger.query("SELECT id, advantage FROM samples ORDER BY id")
    assert [tuple(row) for row in rows] == [("g0.0", None), ("g0.1", 1.5), ("g1.0", -0.5)]
    with pytest.raises(ValueError, match="zip"):
        ledger.record_advantages(0, bytes(4))
    with pytest.raises(ValueError, match="zip"):
        ledger.record_advantages(7, bytes(4))


def completion(sample: str, turn: int, attempt: int, prompt: int, tokens: int, finish: str = "stop") -> PayloadRecord:
    """Return a completion of zeros; ``prompt`` and ``tokens``: numbers of tokens."""
    spans = [VersionSpan(attempt, 0, tokens)] if tokens else []
    return PayloadRecord(
        sample, turn, attempt, bytes(4 * prompt), bytes(4 * tokens), bytes(4 * tokens), spans, finish, ""
    )


async def test_what_open_samples_have_generated_is_restored_from_their_completions(ledger: LedgerWriter) -> None:
    ledger.admit_group("g0", Kind.TRAIN, 0, "sums", 0, 0, ["g0.0"], 0)
    ledger.record_completion(completion("g0.0", 0, 0, 2, 3), "", 5, 0, 0)
    ledger.end_samples(["g0.0"], State.EXPIRED, "late")
    ledger.admit_group("g1", Kind.TRAIN, 1, "sums", 1, 0, ["g1.0", "g1.1", "g1.2"], 0)
    ledger.record_completion(completion("g1.0", 0, 0, 2, 3, "abort"), "", 5, 4, 4)
    ledger.record_completion(completion("g1.0", 0, 1, 2, 1), "", 6, 4, 5)
    ledger.record_completion(completion("g1.1", 0, 0, 2, 3), "", 5, 4, 4)
    ledger.discard_generation("g1.1", 1)
    ledger.record_completion(completion("g1.2", 0, 0, 2, 3), "", 5, 4, 4)
    ledger.record_score("g1.2", Kind.TRAIN, 1.0, [1.0], {}, "text")
    await ledger.drain()
    before, ledger.progress = ledger.progress, {}
    ledger.restore()
    assert ledger.progress == before
    assert {sample_id(number): progress.row for number, progress in before.items()} == {
        "g1.0": ("[2,3]", 2, 4, 6, None, 4, 5, "stop"),
        "g1.1": ("[4]", None, None, None, None, None, None, None),
    }
    ledger.record_completion(completion("g1.1", 0, 1, 2, 1), "", 3, 6, 6)
    ledger.record_score("g1.1", Kind.TRAIN, 1.0, [1.0], {}, "text")
    await ledger.drain()
    columns = "completions, prompt_tokens, response_tokens, total_tokens, min_version, max_version, finish"
    rows = ledger.query(f"SELECT {columns} FROM samples ORDER BY number")
    assert [tuple(row) for row in rows] == [
        ("[1]", 2, 3, 5, 0, 0, "stop"),
        (None, None, None, None, None, None, None),
        ("[4,6]", 2, 1, 3, 6, 6, "stop"),
        ("[5]", 2, 3, 5, 4, 4, "stop"),
    ]


async def test_segments_of_open_samples_and_of_batches_since_a_step_are_needed(ledger: LedgerWriter) -> None:
    for number in range(3):
        ledger.admit_group(f"g{number}", Kind.TRAIN, number, "sums", number, 0, [f"g{number}.0"], 0)
        ledger.record_completion(completion(f"g{number}.0", 0, 0, 2, 3), "", 5, 0, 0)
        await ledger.drain()
        ledger.db.execute("UPDATE completions SET segment = ?1 WHERE number = ?1 + 1", (number,))
    assert queries.first_needed_segment(ledger.query, 0) == 0
    for number in range(2):
        ledger.record_score(f"g{number}.0", Kind.TRAIN, 1.0, [1.0], {}, "text")
        ledger.record_batch(number, [f"g{number}.0"])
    await ledger.drain()
    assert queries.first_needed_segment(ledger.query, 7) == 0, "batches that are not trained are open"
    ledger.end_samples(["g0.0", "g1.0"], State.TRAINED, "")
    await ledger.drain()
    assert queries.first_needed_segment(ledger.query, 7) == 2
    assert queries.first_needed_segment(ledger.query, 1) == 1
    ledger.end_samples(["g2.0"], State.EXPIRED, "late")
    await ledger.drain()
    assert queries.first_needed_segment(ledger.query, 7) is None
