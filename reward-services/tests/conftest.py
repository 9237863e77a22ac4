"""What all tests of this folder need."""

from __future__ import annotations

import pytest

from rljob.rewards import pool


@pytest.fixture(autouse=True)
def workers_may_start_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples wait for a worker however busy the machine is."""
    monkeypatch.setattr(pool, "SET_UP_SECONDS", 60.0)
