"""The states of a sample, and which state may follow which. Writes check it, readers and audit use the names."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a group and its samples are for."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class State(StrEnum):
    """Where a sample is, or how it ended."""

    ADMITTED = "admitted"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    EXPIRED = "expired"
    FAILED = "failed"
    EVALUATED = "evaluated"


OPEN = (State.ADMITTED, State.SCORED, State.BATCHED)
"""States of samples that have not ended."""
REJECTED = (State.FILTERED, State.SURPLUS, State.EXPIRED, State.FAILED)
"""Ends of samples that were started and neither trained nor evaluated."""
PREDECESSORS: dict[State, tuple[State, ...]] = {
    State.SCORED: (State.ADMITTED,),
    State.EVALUATED: (State.ADMITTED,),
    State.BATCHED: (State.SCORED,),
    State.TRAINED: (State.BATCHED,),
    State.FILTERED: (State.ADMITTED, State.SCORED),
    State.SURPLUS: (State.ADMITTED, State.SCORED),
    State.EXPIRED: (State.ADMITTED, State.SCORED),
    State.FAILED: (State.ADMITTED, State.SCORED),
}
"""State → the states a sample may have before it. A group's samples are admitted together; a state never goes back."""


def quoted(states: tuple[State, ...]) -> str:
    """Return states as the list of an SQL ``IN (…)``."""
    return ", ".join(f"'{state}'" for state in states)
