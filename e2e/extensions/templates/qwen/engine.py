"""The page's engine for a transformers model, so that the built-in trainer can train what it serves."""

from __future__ import annotations

from mypackage.engine import TableEngine


class QwenEngine(TableEngine):
    """The adapter of one pool."""

    program = "qwen.server"
