"""Lengths of answers of training: of one batch, and of all samples that were scored; how many were cut."""

from __future__ import annotations

from dataclasses import dataclass

from rljob.ledger.queries import Query
from rljob.ledger.sample_numbers import MEMBER_BITS
from rljob.ledger.states import OPEN, State, quoted


@dataclass
class GroupSums:
    """Sums over all groups of training of products of two numbers: its answers that were ``scored``, and those of them
    that were ``trained``; ``both``: one times the other."""

    scored: int = 0
    both: int = 0
    trained: int = 0

    def effective_size(self, trained: int, rest: int) -> float:
        """Return the effective size of a comparison of trained answers with the rest of the scored ones: n·m / (n + m)
        if all lengths are independent, less if those of a group are related.

        The difference of the two parts of answers that are at most of some length has the variance
        (1 - ρ)·(1 / trained + 1 / rest) + ρ·Σ (trained of a group / trained - rest of it / rest)² times that of one
        answer, if two answers of a group have the correlation ρ. It is unknown and differs between lengths, so this is
        the larger one of ρ = 0 and ρ = 1.
        """
        of_rest = self.scored - 2 * self.both + self.trained
        of_each = self.trained / trained**2 + of_rest / rest**2 - 2 * (self.both - self.trained) / (trained * rest)
        return 1 / max(1 / trained + 1 / rest, of_each)


def lengths_of_batch(query: Query, step: int) -> list[tuple[int, int]]:
    """Return (response tokens, samples) of the batch of ``step``."""
    rows = query("SELECT response_tokens, COUNT(*) FROM samples WHERE step = ? GROUP BY response_tokens", step)
    return [(row[0], row[1]) for row in rows]


def scored_lengths(query: Query, greedy: bool) -> list[tuple[int, int, int]]:
    """Return (response tokens, samples scored, those of them that were trained) of the samples of training; ``greedy``:
    without the first of each group. It reads all samples: call it once, when the coordinator starts."""
    rows = query(
        f"SELECT response_tokens, COUNT(*), TOTAL(state = '{State.TRAINED}') FROM samples WHERE {_scored(greedy)}"
        " GROUP BY response_tokens"
    )
    return [(row[0], row[1], int(row[2])) for row in rows]


def scored_groups(query: Query, greedy: bool) -> GroupSums:
    """Return the sums over the groups of the samples of :func:`scored_lengths`. It reads all samples too."""
    rows = query(
        "SELECT TOTAL(scored * scored), TOTAL(scored * trained), TOTAL(trained * trained) FROM"
        f" (SELECT COUNT(*) AS scored, SUM(state = '{State.TRAINED}') AS trained FROM samples WHERE {_scored(greedy)}"
        f" GROUP BY number >> {MEMBER_BITS})"
    )
    return GroupSums(*(int(total) for total in rows[0]))


def _scored(greedy: bool) -> str:
    """Return the condition that a sample of training was scored and is no greedy answer."""
    # A sample of an evaluation that has a reward is in the state evaluated.
    return f"reward IS NOT NULL AND state != '{State.EVALUATED}' AND {_member(greedy)}"


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
