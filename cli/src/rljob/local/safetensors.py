"""Looks at safetensors files without loading them.

Such a file begins with the length of a JSON header (eight bytes, little-endian) and the header: tensor → dtype, shape
and place in the bytes that follow (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


def read_header(path: Path) -> dict[str, Any]:
    """Return tensor → what the header of ``path`` says of it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not begin with a header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(min(MAX_HEADER_BYTES, length)))
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    header.pop("__metadata__", None)
    return header


def damage(path: Path) -> str:
    """Return what is wrong with a file, in a few words; empty when header and length agree.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        ends = [tensor["data_offsets"][1] for tensor in read_header(path).values()]
        with path.open("rb") as file:
            begin = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        length = begin + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError):
        return "does not begin with a header"
    size = path.stat().st_size
    return "" if size == length else f"has {size:,} bytes instead of {length:,}"
