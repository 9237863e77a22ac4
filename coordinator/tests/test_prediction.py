"""Predictions of one split, from the counted steps alone; `rljob simulate` has its tests in cli/tests."""

from __future__ import annotations

from typing import Any

import pytest
from world import job

from rljob.api.speeds import Speeds
from rljob.protocol.simulation_messages import SplitPrediction
from rljob.simulation.prediction import predict_split


def predicted(alpha: int, steps: int, **answers: float) -> SplitPrediction:
    """Return the prediction of batches of four samples on one engine of four slots with 20 tokens/s."""
    task = {"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r"}
    manifest = job(alpha=alpha, tasks=[task | {"sampling": {"maxTokens": 400}}])
    speeds: dict[str, Any] = {
        "engine": {"tokensPerSecondPerSequence": 10.0, "tokensPerSecond": 20.0},
        "trainer": {"tokensPerSecondPerGpu": 100.0},
        "answers": {"medianTokens": 40.0, "sigma": 0.0} | answers,
    }
    found = predict_split(manifest, Speeds.model_validate(speeds), 1, 1, steps)
    assert isinstance(found, SplitPrediction)
    return found


def test_staleness_is_that_of_the_counted_steps() -> None:
    """α = 1 and a fast trainer: each batch starts one version before its step, except the first one."""
    assert predicted(alpha=1, steps=2).mean_staleness == 1


@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (1.0, 1), (1.0, 2)])
def test_an_engine_that_is_never_idle_generates_what_it_can(sigma: float, steps: int) -> None:
    """Answers run over the beginning and the end of the counted steps."""
    split = predicted(alpha=4, steps=steps, medianTokens=20.0, sigma=sigma)
    assert split.engine_utilisation == pytest.approx(1.0)
    assert split.tokens_per_second == pytest.approx(20.0)
