"""Lengths of answers of training: of one batch, and of all samples that were scored; how many were cut."""

from __future__ import annotations

from rljob.ledger.queries import Query
from rljob.ledger.sample_numbers import MEMBER_BITS
from rljob.ledger.states import OPEN, State, quoted


def lengths_of_batch(query: Query, step: int) -> list[tuple[int, int]]:
    """Return (response tokens, samples) of the batch of ``step``."""
    rows = query("SELECT response_tokens, COUNT(*) FROM samples WHERE step = ? GROUP BY response_tokens", step)
    return [(row[0], row[1]) for row in rows]


def scored_lengths(query: Query, greedy: bool) -> list[tuple[int, int, int]]:
    """Return (response tokens, samples scored, those of them that were trained) of the samples of training; ``greedy``:
    without the first of each group. It reads all samples: call it once, when the coordinator starts."""
    # A sample of an evaluation that has a reward is in the state evaluated.
    rows = query(
        f"SELECT response_tokens, COUNT(*), TOTAL(state = '{State.TRAINED}') FROM samples"
        f" WHERE reward IS NOT NULL AND state != '{State.EVALUATED}' AND {_member(greedy)} GROUP BY response_tokens"
    )
    return [(row[0], row[1], int(row[2])) for row in rows]


def _member(greedy: bool) -> str:
    """Return the condition that a sample is no greedy answer."""
    return f"member >= {int(greedy)}"


def cut_answers(query: Query, greedy: bool) -> int:
    """Return how many samples of training ended without a score although engines had begun with their group. It reads
    all samples, as :func:`scored_lengths`."""
    rows = query(
        f"SELECT COUNT(*) FROM samples s CROSS JOIN groups g ON g.number = s.number >> {MEMBER_BITS}"
        f" WHERE s.number >= 0 AND s.reward IS NULL AND s.state NOT IN ({quoted(OPEN)}) AND g.dispatched IS NOT NULL"
        f" AND {_member(greedy)}"
    )
    return int(rows[0][0])
