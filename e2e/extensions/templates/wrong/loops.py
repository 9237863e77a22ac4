"""Loops that cannot be used."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from typing import Any


def not_async(context: Any) -> float:
    """Return at once."""
    return 1.0


async def ends_its_runner(context: Any) -> Any:
    """Guess; one sample blocks its runner, one crashes it, and one calls sys.exit in a task."""
    answer = await context.generate(context.prompt.token_ids)
    if context.sample == "g0.1":
        time.sleep(3600)
    if context.sample == "g1.0":
        ctypes.string_at(0)
    if context.sample == "g2.3":
        await asyncio.gather(asyncio.to_thread(str), _tool())
    return await context.score(context.answer(answer), answer.finish)


async def _tool() -> None:
    sys.exit(2)
