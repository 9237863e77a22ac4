"""Options of the rewards that ship with rljob: `config` of a reward with `builtin`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExactMatch:
    """Options of `exact_match`.

    ``column`` holds the correct answer. ``extract`` finds the answer in the completion: its last match, or the first
    group of that match; None: the whole completion.
    """

    column: str = "answer"
    extract: re.Pattern[str] | None = None
    ignore_case: bool = False


def exact_match(config: dict[str, Any]) -> ExactMatch:
    """Return the options of a config without :func:`option_problems`."""
    extract = config.get("extract")
    return ExactMatch(
        column=config.get("column", ExactMatch.column),
        extract=None if extract is None else re.compile(extract),
        ignore_case=config.get("ignoreCase", ExactMatch.ignore_case),
    )


def option_problems(builtin: str, config: dict[str, Any]) -> Iterator[str]:
    """Yield ``OPTION: sentence`` for each invalid option of a builtin."""
    options = OPTIONS[builtin]
    for name, value in config.items():
        if name not in options:
            there = f"there are {', '.join(options)}" if options else "it has none"
            yield f"{name}: {builtin} has no such option, {there}; remove it"
            continue
        kind = options[name]
        if not isinstance(value, kind):
            yield f"{name}: must be {_WORDS[kind]}, not {value!r}"
        elif name == "extract":
            try:
                re.compile(config[name])
            except re.error as error:
                yield f"{name}: {value!r} is not a regular expression: {error}; correct it"


OPTIONS: dict[str, dict[str, type]] = {
    "reasoning_gym": {},
    "exact_match": {"column": str, "extract": str, "ignoreCase": bool},
}
"""Builtin → option → its type."""

_WORDS = {str: "text", bool: "true or false"}
