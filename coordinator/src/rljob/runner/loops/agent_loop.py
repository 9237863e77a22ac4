"""The task's agent program calls the model: each answered call is a turn, and the program's end is the sample's."""

from __future__ import annotations

from rljob.protocol.score_messages import Score
from rljob.runner.context import Context


async def agent(context: Context) -> Score:
    """Run the agent program once and return the sample's score.

    A number that the program returns is the reward of the last turn. A text that it returns, else the last answer, is
    scored by the task's reward, if it has one, which is added.
    """
    outcome = await context.agent.run()
    if outcome.reward is not None:
        outcome.context.reward(outcome.reward)
    score = await outcome.context.score(outcome.completion, outcome.finish)
    score.metrics = score.metrics | {
        "turns": float(outcome.turns),
        "context_limit": float(outcome.context_limit),
        "forks": float(outcome.forks),
    }
    return score
