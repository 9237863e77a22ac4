"""The page's engine for a transformers model, so that the built-in trainer backend can train what it serves."""

from __future__ import annotations

import os
import sys

from mypackage.engine import TableEngine
from rljob.rollout.adapters.base import Launch


class QwenEngine(TableEngine):
    """Servers of one pool."""

    def launch(self, port: int, key: str) -> Launch:
        command = [sys.executable, "-m", "qwen.server", str(self.model), str(port), str(os.getpid())]
        return Launch(command, {"TABLE_KEY": key})
