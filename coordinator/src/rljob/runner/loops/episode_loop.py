"""Turn by turn in the task's environment: the answer is the action, the observation is appended to the context."""

from __future__ import annotations

from collections import defaultdict

from rljob.protocol.episode_messages import Observation
from rljob.protocol.score_messages import Score
from rljob.runner.context import Context, TrajectoryError


async def environment(context: Context) -> Score:
    """Play one episode and return its score.

    The reward of a step is credited to the turn that made it. The episode ends when the environment ends it, after
    `environment.maxTurns` answers, or when an observation leaves no room for an answer (`environment.onContextLimit`).
    The state before a turn is the observation that it answers.
    """
    episode = context.episode
    context.state((await episode.reset()).observation)
    tokens, means = context.prompt.token_ids, defaultdict[str, list[float]](list)
    turns, limit = 0, ""
    while True:
        answer = await context.generate(tokens)
        completion = context.answer(answer)
        found = await episode.step(completion)
        turns += 1
        context.reward(found.reward)
        for name, value in found.means.items():
            means[name].append(value)
        if found.ended:
            break
        if turns == episode.limits.max_turns:
            limit = "turns"
            break
        observation = episode.tokens(found.observation, answer.token_ids)
        if context.room < len(observation) // 4 + episode.max_tokens:
            limit = "context"
            break
        tokens += answer.token_ids + observation
        context.state(found.observation)
    if limit == "context" and episode.limits.on_context_limit == "fail":
        raise TrajectoryError(
            f"after turn {turns} an observation leaves no room for an answer; raise maxModelLength, or set "
            "environment.onContextLimit: end"
        )
    score = await context.score(completion, answer.finish)
    score.metrics = score.metrics | _metrics(found, means, turns, limit)
    return score


def _metrics(found: Observation, means: dict[str, list[float]], turns: int, limit: str) -> dict[str, float]:
    """Return the metrics of the environment, the number of turns, and how the episode ended."""
    return {
        **{name: sum(values) / len(values) for name, values in means.items()},
        **found.metrics,
        "turns": float(turns),
        "terminated": float(found.terminated),
        "truncated": float(found.truncated),
        "turn_limit": float(limit == "turns"),
        "context_limit": float(limit == "context"),
    }
