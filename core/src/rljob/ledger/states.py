"""The states of a sample and the allowed transitions. Writes check the transitions; readers and audit use the names."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """Purpose of a group and its samples."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class State(StrEnum):
    """State of a sample, or its end."""

    ADMITTED = "admitted"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    BASELINE = "baseline"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    EXPIRED = "expired"
    FAILED = "failed"
    EVALUATED = "evaluated"


OPEN = (State.ADMITTED, State.SCORED, State.BATCHED)
"""States of samples that have not ended."""
REJECTED = (State.FILTERED, State.SURPLUS, State.EXPIRED, State.FAILED)
"""Ends of samples that were started and neither trained nor used as a baseline nor evaluated."""
PREDECESSORS: dict[State, tuple[State, ...]] = {
    State.SCORED: (State.ADMITTED,),
    State.EVALUATED: (State.ADMITTED,),
    State.BATCHED: (State.SCORED,),
    State.TRAINED: (State.BATCHED,),
    State.BASELINE: (State.SCORED,),
    State.FILTERED: (State.ADMITTED, State.SCORED),
    State.SURPLUS: (State.ADMITTED, State.SCORED),
    State.EXPIRED: (State.ADMITTED, State.SCORED),
    State.FAILED: (State.ADMITTED, State.SCORED),
}
"""State → allowed previous states. The samples of a group are admitted together; no transition goes back."""


def quoted(states: tuple[State, ...]) -> str:
    """Return states as the operand list of an SQL ``IN (…)``."""
    return ", ".join(f"'{state}'" for state in states)
