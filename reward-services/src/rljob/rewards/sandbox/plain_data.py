"""Plain data as JSON, for the channel between the tests and the program: values and nothing that acts.

Exact: integers of any length, floats bit for bit, tuples, named ones, sets, bytes, queues and values of COPIED.
Whatever else a program returns crosses as the number of an object that stays with the program. ``pickle`` and
``marshal`` would let the program act in the reader.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

Reference = Callable[[Any], Any]
MAX_EXACT = 1 << 53
COPIED = {
    **{"range": "builtins", "Fraction": "fractions", "Decimal": "decimal"},
    **dict.fromkeys(("date", "datetime", "time", "timedelta"), "datetime"),
}
"""Types → modules of values that the arguments of their types make again."""


def encode(value: Any, reference: Reference) -> Any:
    """Return ``value`` for JSON.

    Args:
        value: of the program or of the tests.
        reference: returns the code of a value that is no plain data.

    Raises:
        RecursionError: the value contains itself.
    """
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < MAX_EXACT else ["i", hex(number)]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).hex()]
    if isinstance(value, dict):
        items = dict.items(value)
        return ["d", [[encode(key, reference), encode(item, reference)] for key, item in items]]
    if isinstance(value, tuple) and (fields := getattr(type(value), "_fields", None)):
        return ["n", type(value).__name__, list(fields), [encode(item, reference) for item in tuple.__iter__(value)]]
    kinds: tuple[tuple[Any, str], ...] = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"))
    for kind, tag in kinds:
        if isinstance(value, kind):
            return [tag, [encode(item, reference) for item in kind.__iter__(value)]]
    if type(value) is deque:
        return ["q", [encode(item, reference) for item in value], value.maxlen]
    name = type(value).__name__
    if name in COPIED and type(value) is getattr(sys.modules.get(COPIED[name]), name, None):
        arguments = value.__reduce_ex__(4)[1]
        if all(isinstance(argument, (int, str, bytes)) for argument in arguments):  # not the time zone of a datetime
            return ["v", name, [encode(argument, reference) for argument in arguments]]
    return reference(value)


def decode(code: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """Return the value of a code, which may come from a hostile program.

    Args:
        code: of :func:`encode`.
        resolve: returns the value of a reference.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError, RecursionError: it is not a code.
    """
    if code is None or isinstance(code, (bool, str, int)):
        return code
    tag, content = code[0], code[1]
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(float.fromhex(content), float.fromhex(code[2]))
    if tag in ("b", "B"):
        return bytes.fromhex(content) if tag == "b" else bytearray.fromhex(content)
    if tag == "d":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    if tag in ("l", "t", "s", "z"):
        kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
        return kind(decode(item, resolve) for item in content)
    if tag == "n":
        return _named_tuple(content, tuple(code[2]))(*(decode(item, resolve) for item in code[3]))
    if tag == "q":
        return deque((decode(item, resolve) for item in content), code[2])
    if tag == "v":
        return getattr(importlib.import_module(COPIED[content]), content)(*(decode(each, resolve) for each in code[2]))
    return resolve(code)


@functools.lru_cache(maxsize=256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    return namedtuple(name, fields)  # it checks the names


def replace_contents(old: Any, new: Any) -> Any:
    """Make what a function can change of its arguments equal to ``new`` in place: lists, dictionaries, sets and others.

    Returns:
        ``old`` if it could be changed, else ``new``.
    """
    if type(old) is not type(new) or not isinstance(old, (list, dict, set, deque, bytearray)):
        return new
    if isinstance(old, list):
        old[:] = [replace_contents(a, b) for a, b in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict):
        merged = {key: replace_contents(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set):
        old.intersection_update(new)
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        old[:] = new
    return old
