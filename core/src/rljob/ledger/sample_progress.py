"""What the completions of a sample without a reward add up to.

A completion is a row that is added once. The row of its sample gets the sums with the reward, or at the end of a sample
that gets none, so a sample that is generated in many requests changes one page. Until then they follow from its
completions, which are after the admission of the oldest open group.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rljob.protocol.branches import TurnKey, last_turns

OPEN_COMPLETIONS = "c.number > (SELECT MIN(completions) FROM groups INDEXED BY groups_open WHERE open = 1)"
"""Condition that all completions c of open samples fulfil, and few others."""
_COMPLETIONS = (
    "SELECT c.number, c.sample_number, c.turn, c.branch, c.attempt, c.finish, c.tokens, c.total_tokens,"
    " c.min_version, c.max_version, s.attempt AS first_attempt"
    " FROM completions c CROSS JOIN samples s ON s.number = c.sample_number"
    f" WHERE {OPEN_COMPLETIONS} AND s.completions IS NULL ORDER BY c.number"
)

_encoder = msgspec.json.Encoder()


class SampleProgress(msgspec.Struct):
    """A sample with completions. ``numbers``: of all its completions; the others are None until one of them counts."""

    numbers: list[int] = []
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    min_version: int | None = None
    max_version: int | None = None  # -1: no completion that counts has a version
    finish: str | None = None
    ends: dict[str, tuple[int, int]] = {}  # branch → its last turn, and the tokens after it

    def add(
        self, key: TurnKey, tokens: int, total_tokens: int, finish: str, min_version: int | None, max_version: int
    ) -> None:
        """Add a completion that counts; the arguments are those of its row."""
        if self.prompt_tokens is None:
            self.prompt_tokens = total_tokens - tokens
        self.ends[key[1]] = (key[0], total_tokens)
        self.response_tokens = (self.response_tokens or 0) + tokens
        self.finish, self.min_version = finish, min_version
        self.max_version = max_version if self.max_version is None else max(self.max_version, max_version)

    def discard(self) -> None:
        """Forget the completions so far except for their numbers."""
        self.prompt_tokens = self.response_tokens = None
        self.min_version = self.max_version = self.finish = None
        self.ends.clear()

    @property
    def sequences(self) -> list[int]:
        """Tokens of each sequence: of each branch whose last turn no other branch continues."""
        return sequence_lengths(self.ends)

    @property
    def row(self) -> tuple[Any, ...]:
        """The values of :data:`COLUMNS`."""
        sequences = self.sequences
        return (
            _json(self.numbers), self.prompt_tokens, self.response_tokens, sum(sequences) if sequences else None,
            _json(sequences) if len(sequences) > 1 else None, self.min_version, self.max_version, self.finish,
        )  # fmt: skip


def _json(numbers: list[int]) -> str:
    return _encoder.encode(numbers).decode()


COLUMNS = (
    "completions", "prompt_tokens", "response_tokens", "total_tokens", "sequences", "min_version", "max_version",
    "finish",
)  # fmt: skip
"""Columns of the table samples that a :class:`SampleProgress` fills."""


def sequence_lengths(ends: Mapping[str, tuple[int, int]]) -> list[int]:
    """Return the tokens of each sequence of a sample, in the order of the sequences.

    Args:
        ends: branch → its last turn, and the tokens after it.
    """
    if len(ends) == 1:
        return [tokens for _, tokens in ends.values()]
    last = last_turns((turn, branch) for branch, (turn, _) in ends.items())
    return [ends[branch][1] for _, branch in last]


def progress_of_open_samples(query: Callable[..., list[sqlite3.Row]]) -> dict[int, SampleProgress]:
    """Return number → progress of the open samples that have completions and no reward."""
    found: dict[int, SampleProgress] = {}
    for row in query(_COMPLETIONS):
        progress = found.setdefault(row["sample_number"], SampleProgress())
        progress.numbers.append(row["number"])
        if row["attempt"] >= row["first_attempt"]:
            key = (row["turn"], row["branch"])
            progress.add(key, row["tokens"], row["total_tokens"], row["finish"], row["min_version"], row["max_version"])
    return found
