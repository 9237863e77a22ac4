"""Makes text of models, data rows, rewards, exceptions and file names safe to print.

A terminal acts on control characters, and invisible characters change what a reader sees. Both are shown as escapes
(``\\x1b``, ``\\u202e``), in the notation of Python, which is also that of YAML in double quotes. Every output of the
command line, and every message in the status of an RLJob, goes through this module.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar, cast

T = TypeVar("T")
_HIDDEN = (
    "\x7f-\x9f"  # DEL and C1 controls
    "\xad\u061c\u180e"  # soft hyphen, Arabic letter mark, Mongolian vowel separator
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, line separators, bidirectional controls
    "\ufeff\ufff9-\ufffb"  # byte order mark, interlinear annotation
    "\ud800-\udfff"  # lone surrogates: no encoding has them
    "\U000e0000-\U000e007f"  # tags
)
_IN_LINE = re.compile(f"[\x00-\x1f{_HIDDEN}]")
_IN_BLOCK = re.compile(f"[\x00-\x08\x0b-\x1f{_HIDDEN}]")  # without tab and newline
_IN_JSON = re.compile(f"[{_HIDDEN}]")  # JSON has escaped C0 controls; between its values it has newlines
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def escape_line(text: str) -> str:
    """Return ``text`` on one line: newlines and tabs are escaped too."""
    return _IN_LINE.sub(_escape, text)


def short_line(text: str, most: int) -> str:
    """Return ``text`` on one line, escaped, and cut to ``most`` characters."""
    line = escape_line(text[:most])
    return line if len(line) <= most and len(text) <= most else f"{line[: most - 1]}…"


def escape_block(text: str) -> str:
    """Return ``text`` with its newlines and tabs, all other control and invisible characters escaped."""
    return _IN_BLOCK.sub(_escape, text)


def escape_data(value: T) -> T:
    """Return a copy of plain data (dataclasses, lists, tuples, mappings) with every text escaped as a block."""
    return cast("T", _escape_data(value))


def _escape_data(value: Any) -> Any:
    match value:
        case str():
            return escape_block(value)
        case list() | tuple():
            return type(value)(map(_escape_data, value))
        case dict():
            return {_escape_data(key): _escape_data(inner) for key, inner in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
            escaped = {name: _escape_data(inner) for name, inner in fields.items() if not isinstance(inner, float)}
            changed = {name: inner for name, inner in escaped.items() if inner != fields[name]}
            return dataclasses.replace(value, **changed) if changed else value  # a history is long and has no text
    return value


def escape_json(text: str) -> str:
    """Return the JSON document ``text`` with control and invisible characters as escapes of JSON: the same value."""
    return _IN_JSON.sub(_json_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if code < 0x100:
        return _SHORT.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
