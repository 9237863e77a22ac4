"""Lengths of answers of training: of one batch, and of all samples that were scored."""

from __future__ import annotations

from rljob.ledger.queries import Query
from rljob.ledger.states import State


def lengths_of_batch(query: Query, step: int) -> list[tuple[int, int]]:
    """Return (response tokens, samples) of the batch of ``step``."""
    rows = query("SELECT response_tokens, COUNT(*) FROM samples WHERE step = ? GROUP BY response_tokens", step)
    return [(row[0], row[1]) for row in rows]


def scored_lengths(query: Query) -> list[tuple[int, int, int]]:
    """Return (response tokens, samples scored, those of them that were trained) of the samples of training. It reads
    all samples: call it once, when the coordinator starts."""
    # A sample of an evaluation that has a reward is in the state evaluated.
    rows = query(
        f"SELECT response_tokens, COUNT(*), TOTAL(state = '{State.TRAINED}') FROM samples"
        f" WHERE reward IS NOT NULL AND state != '{State.EVALUATED}' GROUP BY response_tokens"
    )
    return [(row[0], row[1], int(row[2])) for row in rows]
