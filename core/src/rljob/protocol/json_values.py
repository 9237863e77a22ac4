"""Bound of the number of values of a JSON text, which is checked before the text is decoded.

A decoded value takes up to 30 times the memory of its text: ``[],`` is a list of 56 bytes and a pointer to it. The
length of a text is thus no useful bound of the memory and the time that a field of any type takes.
"""

from __future__ import annotations

import itertools
import re

_MARK = re.compile(rb'[\[{,]|"[^"]*"?')


def has_more_marks(text: bytes, most: int) -> bool:
    """Return whether a JSON text has more than ``most`` marks: strings, and outside them opening brackets and commas.

    Every value but the first follows a bracket or a comma, or the string that is its key. A text that is no JSON has
    any result. A text of up to ``most`` bytes is not searched.
    """
    if len(text) <= most or sum(map(text.count, (b"[", b"{", b",", b'"'))) <= most:
        return False
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return next(itertools.islice(_MARK.finditer(unescaped), most, None), None) is not None
