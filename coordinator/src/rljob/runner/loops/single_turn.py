"""One prompt, one answer, one score."""

from __future__ import annotations

from rljob.protocol.score_messages import Score
from rljob.runner.context import Context


async def single_turn(context: Context) -> Score:
    """Generate once from the prompt and have the answer scored."""
    turn = await context.generate(context.prompt.token_ids)
    return await context.score(context.decode(turn.token_ids), turn.finish)
