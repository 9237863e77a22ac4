"""A group filter that fails at first."""

from __future__ import annotations

_calls: list[list[float]] = []


def fails_at_first(rewards: list[float]) -> object:
    """Raise for the first group, return no bool for the second one, and accept all others."""
    _calls.append(rewards)
    if len(_calls) == 1:
        raise RuntimeError("a licence is missing")
    return None if len(_calls) == 2 else True
