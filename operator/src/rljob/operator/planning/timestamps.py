"""Converts timestamps of the status. No clock is read: ``now`` is part of the observation."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def instant(seconds: float) -> str:
    """Return Unix seconds as a Kubernetes timestamp, rounded down to a second."""
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str | None) -> float | None:
    """Return a timestamp as Unix seconds; None for an absent or invalid one."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def age(since: str | None, now: float) -> float:
    """Return the seconds since a timestamp; 0 if there is none, or if it is later than ``now``."""
    begin = seconds_of(since) if since else None
    return 0.0 if begin is None else max(0.0, now - begin)


def remaining(since: str | None, span: float, now: float) -> float:
    """Return the seconds until ``span`` seconds have passed since a timestamp; 0 or less once they have."""
    begin = seconds_of(since) if since else None
    return span if begin is None else begin + span - now
