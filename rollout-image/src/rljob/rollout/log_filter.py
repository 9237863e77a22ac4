"""Drops log records of an engine that warn of expected states."""

from __future__ import annotations

import logging
from collections.abc import Callable


class _Drop(logging.Filter):
    def __init__(self, is_expected: Callable[[logging.LogRecord], bool]) -> None:
        super().__init__()
        self._is_expected = is_expected

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log ``record``."""
        return not self._is_expected(record)


def drop_records(logger: str, is_expected: Callable[[logging.LogRecord], bool]) -> None:
    """Drop the records of a logger for which ``is_expected`` returns True. Replaces the filter of an earlier call."""
    target = logging.getLogger(logger)
    for old in [each for each in target.filters if isinstance(each, _Drop)]:
        target.removeFilter(old)
    target.addFilter(_Drop(is_expected))
