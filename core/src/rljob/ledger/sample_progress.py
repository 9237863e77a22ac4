"""What the completions of a sample without a reward add up to.

A completion is a row that is added once. The row of its sample gets the sums with the reward, or at the end of a sample
that gets none, so a sample that is generated in many requests changes one page. Until then they follow from its
completions, which are after the admission of the oldest open group.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OPEN_COMPLETIONS = "c.number > (SELECT MIN(completions) FROM groups INDEXED BY groups_open WHERE open = 1)"
"""Condition that all completions c of open samples fulfil, and few others."""
_COMPLETIONS = (
    "SELECT c.number, c.sample_number, c.attempt, c.finish, c.tokens, c.total_tokens, c.min_version, c.max_version,"
    " s.attempt AS first_attempt FROM completions c CROSS JOIN samples s ON s.number = c.sample_number"
    f" WHERE {OPEN_COMPLETIONS} AND s.completions IS NULL ORDER BY c.number"
)


@dataclass
class SampleProgress:
    """A sample with completions. ``numbers``: of all its completions; the others are None until one of them counts."""

    numbers: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    total_tokens: int | None = None
    min_version: int | None = None
    max_version: int | None = None  # -1: no completion that counts has a version
    finish: str | None = None

    def add(self, tokens: int, total_tokens: int, finish: str, min_version: int | None, max_version: int) -> None:
        """Add a completion that counts; the arguments are those of its row."""
        if self.prompt_tokens is None:
            self.prompt_tokens = total_tokens - tokens
        self.response_tokens = (self.response_tokens or 0) + tokens
        self.total_tokens, self.finish, self.min_version = total_tokens, finish, min_version
        self.max_version = max_version if self.max_version is None else max(self.max_version, max_version)

    def discard(self) -> None:
        """Forget the completions so far except for their numbers."""
        self.prompt_tokens = self.response_tokens = self.total_tokens = None
        self.min_version = self.max_version = self.finish = None

    @property
    def row(self) -> tuple[Any, ...]:
        """The values of :data:`COLUMNS`."""
        return (
            json.dumps(self.numbers), self.prompt_tokens, self.response_tokens, self.total_tokens, self.min_version,
            self.max_version, self.finish,
        )  # fmt: skip


COLUMNS = ("completions", "prompt_tokens", "response_tokens", "total_tokens", "min_version", "max_version", "finish")
"""Columns of the table samples that a :class:`SampleProgress` fills."""


def progress_of_open_samples(query: Callable[..., list[sqlite3.Row]]) -> dict[int, SampleProgress]:
    """Return number → progress of the open samples that have completions and no reward."""
    found: dict[int, SampleProgress] = {}
    for row in query(_COMPLETIONS):
        progress = found.setdefault(row["sample_number"], SampleProgress())
        progress.numbers.append(row["number"])
        if row["attempt"] >= row["first_attempt"]:
            progress.add(row["tokens"], row["total_tokens"], row["finish"], row["min_version"], row["max_version"])
    return found
