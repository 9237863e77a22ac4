"""Instants of the status and spans between them. No clock is read here: ``now`` always comes with what is observed."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def instant(seconds: float) -> str:
    """Return Unix seconds as Kubernetes writes an instant, rounded down to a second."""
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float | None:
    """Return an instant as Unix seconds; None for what is none (an empty text: it has not happened)."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def age(since: str | None, now: float) -> float:
    """Return the seconds since an instant; 0 when it has not happened, or when the clock has gone back before it."""
    begin = seconds_of(since) if since else None
    return 0.0 if begin is None else max(0.0, now - begin)


def remaining(since: str | None, span: float, now: float) -> float:
    """Return the seconds until ``span`` seconds have passed since an instant; 0 or less once they have."""
    begin = seconds_of(since) if since else None
    return span if begin is None else begin + span - now
