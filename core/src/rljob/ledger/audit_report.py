"""Collects the problems of an audit in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

MAX_NAMED_ROWS = 5
"""Rows that a problem names; further rows are only counted."""


class Check(msgspec.Struct):
    """Result of the check of one property."""

    name: str  # the property
    ok: bool
    examined: int  # number of rows
    problems: list[str]  # one message for each kind of violation
    note: str = ""  # what was not examined, and why

    def fail(self, problem: str) -> None:
        """Add a problem."""
        self.ok = False
        self.problems.append(problem)


@dataclass
class Findings:
    """Violations of one property: problem → (names of the first rows, number of rows)."""

    name: str
    examined: int = 0
    note: str = ""
    _found: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    def add(self, problem: str, row: str) -> None:
        """Add a row that has ``problem``."""
        named, count = self._found.get(problem, ([], 0))
        if len(named) < MAX_NAMED_ROWS:
            named.append(row)
        self._found[problem] = (named, count + 1)

    def add_all(self, problem: str, rows: Iterable[str]) -> None:
        """Add all rows that have ``problem``."""
        for row in rows:
            self.add(problem, row)

    def check(self) -> Check:
        """Return the result, with one message for each problem."""
        problems = []
        for problem, (named, count) in self._found.items():
            more = f" and {count - len(named)} more" if count > len(named) else ""
            problems.append(f"{', '.join(named)}{more}: {problem}")
        return Check(self.name, not problems, self.examined, problems, self.note)
