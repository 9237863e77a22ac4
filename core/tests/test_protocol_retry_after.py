"""The header Retry-After."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rljob.protocol.retry_after import retry_after_seconds

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("61", 60.0),
        ("99999999999999999999", 0.0),  # no whole number of seconds that anyone means, and no date
        ("-3", 0.0),
        ("1.5", 0.0),
        ("٣", 0.0),
        ("soon", 0.0),
        ("Sun, 01 Mar 2026 12:00:20 GMT", 20.0),
        ("Sun, 01 Mar 2026 11:00:20 GMT", 0.0),
        ("Sun, 01 Mar 2026 14:00:20 GMT", 60.0),
        ("Sun, 01 Mar 2026 12:00:20 -0000", 20.0),
    ],
)
def test_a_wait_is_whole_seconds_or_a_date_and_at_most_a_minute(header: str | None, seconds: float) -> None:
    assert retry_after_seconds(header, NOW) == seconds
