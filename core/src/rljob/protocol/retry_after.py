"""The header Retry-After of a reply: when a request may be repeated (RFC 9110, 10.2.3)."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_SECONDS = 60.0
"""A longer wait is shortened to this: a server that recovers earlier is found again."""


def retry_after_seconds(header: str | None, now: datetime | None = None) -> float:
    """Return the seconds to wait, 0 to :data:`LONGEST_SECONDS`.

    Args:
        header: whole seconds, or a date; None: the reply has no such header. Other text counts as none.
        now: present time, for dates.
    """
    text = (header or "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return min(float(text), LONGEST_SECONDS)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError, IndexError, TypeError):
        return 0.0
    date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return min(max((date - (now or datetime.now(UTC))).total_seconds(), 0.0), LONGEST_SECONDS)
