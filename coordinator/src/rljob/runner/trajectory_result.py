"""The result of a trajectory: the score of its loop as a message that the coordinator accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rljob.protocol.branches import TurnKey, order
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.runner_protocol import FromRunner, LeaseTrajectory, TrajectoryScored
from rljob.protocol.score_messages import Score, credit_turns, usable
from rljob.runner.context import TrajectoryError

TEXT_CHARACTERS = 4096

_decoder = frame_decoder(FromRunner)


def scored_message(
    lease: LeaseTrajectory,
    score: Score,
    credits: Mapping[TurnKey, float],
    scores: Sequence[tuple[Score, str]],
    states: Mapping[TurnKey, str],
    answer: Callable[[TurnKey], str],
) -> TrajectoryScored:
    """Return the message of a trajectory whose loop returned ``score``.

    Args:
        credits: of each turn that the loop made, the reward that the loop gave it; added to the rewards of ``score``.
        scores: from the task's reward, each with the branch that was scored.
        states: digest of the state before each turn, or empty.
        answer: returns a turn's answer as text.

    Raises:
        TrajectoryError: the message could not be sent, or has a number that is not finite.
    """
    keys = sorted(credits, key=order)
    own_credits = [credits[key] for key in keys]
    try:
        reward = float(score.reward)
        credited = credit_turns(len(keys), reward, score.turn_rewards)
        if any(own_credits):
            reward = math.fsum([reward, *own_credits])
            together = [given + own for given, own in zip(credited, own_credits, strict=True)]
            credited = credit_turns(len(together), reward, together)
        metrics = {str(name): float(value) for name, value in score.metrics.items()}
    except (ValueError, OverflowError) as error:
        raise TrajectoryError(str(error)) from error
    for name, value in metrics.items():
        if not usable(value):
            raise TrajectoryError(f"the metric {name} of its score is {value}")
    single, last = not any(credited[:-1]), _scored_turn(score, scores, keys)
    result = TrajectoryScored(
        sample=lease.sample,
        reward=reward,
        metrics=metrics,
        text=answer(last)[:TEXT_CHARACTERS],
        turns=len(credited),
        attempt=lease.attempt,
        turn_rewards=[] if single else credited,
        lease=lease.lease,
        branch=last[1],
        states=[states.get(key, "") for key in keys] if any(states.values()) else [],
    )
    try:  # a result that cannot be encoded must fail here, not in the connection that all trajectories share
        _decoder.decode(encode_frame([result]))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise TrajectoryError(f"its result cannot be sent: {error}") from error
    return result


def _scored_turn(score: Score, scores: Sequence[tuple[Score, str]], keys: Sequence[TurnKey]) -> TurnKey:
    """Return the last turn of the branch that got the score; of the last one if the loop made the score itself."""
    branch = next((branch for made, branch in reversed(scores) if made is score), keys[-1][1])
    return max(key for key in keys if key[1] == branch)
