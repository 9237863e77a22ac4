"""Results of the cells of a benchmark, in files: an interrupted benchmark continues with the cells that are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Cells:
    """Results by name.

    Args:
        directory: of the files; made if it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, settings: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a cell from its file, or compute it and write the file.

        Args:
            name: of the cell.
            settings: JSON values that the result depends on; the file of other settings is replaced.
            compute: returns the result, JSON values.
        """
        path = self._directory / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["settings"] == settings:
                found: dict[str, Any] = kept["result"]
                return found
        result = compute()
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"settings": settings, "result": result}))
        draft.rename(path)
        return result
