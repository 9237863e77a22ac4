"""One prompt, one answer, one score."""

from __future__ import annotations

from rljob.protocol.score_messages import Score
from rljob.runner.context import Context


async def single_turn(context: Context) -> Score:
    """Generate one answer to the prompt and return its score."""
    turn = await context.generate(context.prompt.token_ids)
    return await context.score(context.answer(turn), turn.finish)
