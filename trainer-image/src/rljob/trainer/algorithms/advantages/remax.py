"""Advantage with the reward of a greedy answer as baseline."""

from __future__ import annotations

from rljob.trainer.algorithms.advantages.base import Floats, Scalars, from_scalars


@from_scalars
def remax(scalars: Scalars) -> Floats:
    """Return R − R of the greedy answer to the same prompt, which is not trained (ReMax, arXiv 2310.10505).

    The baseline does not depend on the sample, so the expected gradient is that of REINFORCE. Without it (a batch that
    was sampled for another advantage) the result is nan, which ends the run.
    """
    return scalars.rewards_N - scalars.baselines_N
