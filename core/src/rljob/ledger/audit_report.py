"""What an audit finds, collected in bounded memory however much is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

NAMED = 5
"""Offenders a sentence names; the rest are counted."""


class Check(msgspec.Struct):
    """A property and whether it holds."""

    name: str  # the property, a sentence
    ok: bool
    examined: int  # rows looked at
    problems: list[str]  # a sentence for each way in which it is broken
    note: str = ""  # what was not examined, and why

    def fail(self, problem: str) -> None:
        """Add a problem."""
        self.ok = False
        self.problems.append(problem)


@dataclass
class Findings:
    """What breaks one property: way in which it is broken → who, and how many."""

    name: str
    examined: int = 0
    note: str = ""
    _found: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    def add(self, broken: str, who: str) -> None:
        """Add an offender."""
        named, count = self._found.get(broken, ([], 0))
        if len(named) < NAMED:
            named.append(who)
        self._found[broken] = (named, count + 1)

    def take(self, broken: str, offenders: Iterable[str]) -> None:
        """Add offenders."""
        for who in offenders:
            self.add(broken, who)

    def check(self) -> Check:
        """Return what was found as sentences."""
        problems = []
        for broken, (named, count) in self._found.items():
            more = f" and {count - len(named)} more" if count > len(named) else ""
            problems.append(f"{', '.join(named)}{more}: {broken}")
        return Check(self.name, not problems, self.examined, problems, self.note)
