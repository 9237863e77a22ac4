"""Loops that cannot be used."""

from __future__ import annotations

from typing import Any


def not_async(context: Any) -> float:
    """Return at once."""
    return 1.0
