"""Rewards that score several samples at the same time: async functions, and functions of a batch."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from rljob.api.rewards import NotScored, batch
from rljob.protocol.score_messages import ScoreItem
from rljob.rewards import metrics
from rljob.rewards import pool as pool_module
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.pool import Pool


def items(*completions: str) -> list[ScoreItem]:
    return [ScoreItem(f"s{i}", "sums", "", text, "stop", {}) for i, text in enumerate(completions)]


async def scores(reward, *completions: str, seconds: float = 10.0):
    async with Pool(RewardEvaluator(reward, "mine"), "mine", processes=1, timeout_seconds=seconds) as pool:
        return await pool.score(items(*completions))


async def waits(completion: str) -> float:
    if completion == "hang":
        await asyncio.sleep(1000)
    if completion == "block":
        time.sleep(1000)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise":
        raise TimeoutError("its own")
    return float(len(completion))


CHUNK = 30
ALL_OF_A_CHUNK = asyncio.Barrier(CHUNK)


async def waits_for_the_others(completion: str) -> float:
    await ALL_OF_A_CHUNK.wait()
    return float(len(completion))


async def test_an_async_reward_scores_the_samples_of_a_chunk_at_the_same_time() -> None:
    found = await scores(waits_for_the_others, *["x" * i for i in range(CHUNK)], seconds=60.0)
    assert [score.reward for score in found] == list(range(CHUNK))


HANGING: list[str] = []  # in the worker


async def hangs_with_the_others(completion: str) -> float:
    if completion != "hang":
        return await waits(completion)
    HANGING.append(completion)
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        if len(HANGING) < 8:
            raise RuntimeError("a sample ended before all had started") from None
        raise
    return 0.0


async def test_async_samples_that_hang_end_together_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "OWN_LIMIT_SECONDS", 60.0)  # the worker itself is not too slow
    before = metrics.TIMEOUTS._value.get()
    found = await scores(hangs_with_the_others, "a", *["hang"] * 8, "bb", "raise", seconds=1.0)
    assert [score.reward for score in found if not score.error] == [1.0, 2.0]
    assert [score.error for score in found[1:9]] == ["reward mine took longer than 1 s"] * 8
    assert found[10].error == "reward mine raised TimeoutError: its own"
    assert metrics.TIMEOUTS._value.get() == before + 8


@pytest.mark.parametrize(
    ("bad", "seconds", "error"),
    [("block", 2.0, "took longer than 2 s"), ("die", 60.0, "exited (SIGKILL) twice on this sample")],
)
async def test_an_async_sample_that_ends_the_worker_costs_no_other_sample(bad: str, seconds: float, error: str) -> None:
    found = await scores(waits, "a", "bb", bad, "ccc", seconds=seconds)
    assert [score.reward for score in found] == [1.0, 2.0, 0.0, 3.0]
    assert [bool(score.error) for score in found] == [False, False, True, False]
    assert found[2].error.endswith(error)


async def test_an_event_loop_lives_as_long_as_its_worker() -> None:
    loops = []

    async def same(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return float(loops[0] is loops[-1])

    async with Pool(RewardEvaluator(same, "mine"), "mine", processes=1, timeout_seconds=10) as pool:
        for _ in range(3):
            assert [score.reward for score in await pool.score(items("a"))] == [1.0]


@batch
def lengths(completion: list[str]) -> list[object]:
    if "raise" in completion:
        raise ValueError("one of them")
    if "short" in completion:
        return []
    if "die" in completion:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in completion:
        time.sleep(1000)
    return [NotScored("no text") if not text else 100.0 * len(completion) + len(text) for text in completion]


async def test_a_batch_is_one_call() -> None:
    found = await scores(lengths, "a", "", "ccc")
    assert [score.reward for score in found] == [301.0, 0.0, 303.0]
    assert found[1].error == "reward mine did not score the sample: no text"


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("raise", "reward mine raised ValueError: one of them"),
        ("short", "reward mine raised ValueError: it returned 0 scores for 1 samples; return one for each"),
        ("die", "reward mine: the worker exited (SIGKILL) twice on this sample"),
        ("hang", "reward mine took longer than 0.5 s"),
    ],
)
async def test_a_sample_that_fails_a_batch_costs_no_other_sample(bad: str, error: str) -> None:
    first, failed, last = await scores(lengths, "a", bad, "ccc", seconds=0.5)
    assert (first.reward, first.error) == (101.0, "") and (last.reward, last.error) == (103.0, "")
    assert failed.error == error


async def test_an_async_batch_is_one_call() -> None:
    @batch
    async def together(completion: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(completion))] * len(completion)

    assert [score.reward for score in await scores(together, "a", "b")] == [2.0, 2.0]
