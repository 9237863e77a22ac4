"""Reads the small files of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist.

    Raises:
        ValueError: the file cannot be read or does not hold a JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; save the model again") from None
