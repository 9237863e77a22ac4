"""Names of the branches of a trajectory.

A branch continues the tokens that another context of the trajectory had when the branch was made. The first context
is the branch with the empty name. The name of each other branch is that of the branch that it was made from, a slash
unless that is empty, and ``TURN.NUMBER``: the number of its first turn, and its own number, from 1, among the branches
that were made there. ``2.1/4.3`` is the third branch that was made from ``2.1`` before turn 4. A loop that runs again
gives its branches the same names, in whatever order they finish.

Turns are counted from the beginning of the tokens. So the turn that a turn continues follows from (turn, branch).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

TurnKey: TypeAlias = tuple[int, str]
"""Turn and branch."""
ROOT = ""
MAX_NAME = 1000
"""Characters of the name of a branch."""
MOST_CACHED = 1024
"""Names whose parts are kept: the samples of a task give their branches the same names."""
_NAME = re.compile(r"(?:0|[1-9]\d*)\.[1-9]\d*(?:/(?:0|[1-9]\d*)\.[1-9]\d*)*", re.ASCII)


def child(branch: str, turn: int, number: int) -> str:
    """Return the name of branch ``number`` that is made from ``branch`` before its turn ``turn``."""
    return f"{branch}/{turn}.{number}" if branch else f"{turn}.{number}"


@lru_cache(maxsize=MOST_CACHED)
def parts(branch: str) -> tuple[tuple[int, int], ...]:
    """Return (first turn, number) of a branch and of those that it comes from, oldest first: the order of branches."""
    if not branch:
        return ()
    return tuple((int(turn), int(number)) for turn, _, number in (part.partition(".") for part in branch.split("/")))


def order(key: TurnKey) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the sort key of a turn: by branch, then by number. So are the rewards of turns ordered."""
    return parts(key[1]), key[0]


@lru_cache(maxsize=MOST_CACHED)
def first_turn(branch: str) -> int:
    """Return the number of the first turn of a branch."""
    return int(branch.rpartition("/")[2].partition(".")[0]) if branch else 0


def before(key: TurnKey) -> TurnKey | None:
    """Return the turn that a turn continues; None if it is the beginning of its tokens."""
    turn, branch = key
    while branch and first_turn(branch) == turn:
        branch = branch.rpartition("/")[0]
    return (turn - 1, branch) if turn else None


def path(key: TurnKey) -> list[TurnKey]:
    """Return all turns up to a turn, from the beginning of its tokens."""
    found: list[TurnKey] = []
    previous: TurnKey | None = key
    while previous is not None:
        found.append(previous)
        previous = before(previous)
    return found[::-1]


def last_turns(ends: Iterable[TurnKey]) -> list[TurnKey]:
    """Return the ends of the sequences of a sample, in order: of the last turn of each branch, those that no other
    branch continues."""
    ends = set(ends)
    if len(ends) == 1:
        return list(ends)
    continued = {before((first_turn(branch), branch)) for _, branch in ends}
    return sorted(ends - continued, key=order)


def check_turn(turn: int, branch: str) -> None:
    """Check the name of a branch and the number of one of its turns.

    Raises:
        ValueError: the text is not the name of a branch that can have this turn.
    """
    if turn < 0 or len(branch) > MAX_NAME or (branch and not _NAME.fullmatch(branch)):
        raise ValueError(f"it requests turn {turn} of {branch[:40]!r}, which is not the name of a branch")
    turns = [start for start, _ in parts(branch)]
    if turns and (turns != sorted(turns) or turn < turns[-1]):
        raise ValueError(f"it requests turn {turn} of branch {branch}, which begins with a later turn")


def described(turn: int, branch: str) -> str:
    """Return how messages name a turn."""
    return f"turn {turn} of branch {branch}" if branch else f"turn {turn}"


def context_name(sample: str, branch: str) -> str:
    """Return the name of the tokens of a branch, which an agent keeps between two turns."""
    return f"{sample}@{branch}" if branch else sample
