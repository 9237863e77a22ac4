"""The page's engine for a transformers model, so that the built-in trainer can train what it serves."""

from __future__ import annotations

import sys

from mypackage.engine import TableEngine

from rljob.rollout.adapters.base import Launch


class QwenEngine(TableEngine):
    """The adapter of one pool."""

    def launch(self, port: int, key: str) -> Launch:
        return Launch([sys.executable, "-m", "qwen.server", str(self.model), str(port)], {"TABLE_KEY": key})
