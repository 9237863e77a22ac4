from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time

import psutil
import pytest

from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards import metrics
from rljob.rewards.pool import Pool
from rljob.rewards.worker import fork_worker

HANG = "hang"
NAP = "nap"
DIE = "die"


def item(sample: str, completion: str = "") -> ScoreItem:
    return ScoreItem(sample, "sums", "", completion, "stop", {})


def score(item: ScoreItem) -> Score:
    """Return the worker's process id as the reward; some completions hang, sleep or crash."""
    if item.completion == HANG:
        while True:
            pass
    if item.completion == DIE:
        os.kill(os.getpid(), signal.SIGSEGV)
    if item.completion == NAP:
        time.sleep(0.1)
    return Score(item.sample, float(os.getpid()), {}, "")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_scores_have_the_order_of_the_items():
    async with Pool(score, "r", processes=2, timeout_seconds=10) as pool:
        names = [f"g{i}.0" for i in range(200)]
        assert [result.sample for result in await pool.score([item(name) for name in names])] == names


async def test_concurrent_requests_share_all_workers():
    async with Pool(score, "r", processes=2, timeout_seconds=10) as pool:
        results = await asyncio.gather(*(pool.score([item(f"g{r}.{i}") for i in range(50)]) for r in range(4)))
    assert [[v.sample for v in some] for some in results] == [[f"g{r}.{i}" for i in range(50)] for r in range(4)]
    assert len({v.reward for some in results for v in some}) == 2


async def test_a_sample_that_times_out_affects_no_other():
    before = metrics.TIMEOUTS._value.get()
    async with Pool(score, "slow", processes=1, timeout_seconds=2) as pool:
        first, bad, *rest = await pool.score([item("a"), item("b", HANG), item("c"), item("d")])
    assert bad == Score("b", 0.0, {}, "reward slow took longer than 2 s")
    assert [(v.sample, v.error) for v in (first, *rest)] == [("a", ""), ("c", ""), ("d", "")]
    assert first.reward != rest[0].reward == rest[1].reward, "the worker is replaced once"
    assert gone(int(first.reward))
    assert metrics.TIMEOUTS._value.get() == before + 1


async def test_the_limit_is_for_each_sample_not_for_a_chunk():
    async with Pool(score, "r", processes=1, timeout_seconds=2) as pool:
        results = await pool.score([item(f"g{i}.0", NAP) for i in range(22)])
    assert [v.error for v in results] == [""] * 22
    assert len({v.reward for v in results}) == 1, "all together exceed the limit, none does alone"


async def test_a_sample_that_kills_its_worker_twice_is_an_error():
    before = metrics.CRASHES._value.get()
    async with Pool(score, "crash", processes=1, timeout_seconds=10) as pool:
        bad, good = await pool.score([item("a", DIE), item("b")])
    assert bad.error == "reward crash: the worker exited (SIGSEGV) twice on this sample"
    assert good.error == ""
    assert metrics.CRASHES._value.get() == before + 2


async def test_an_idle_worker_that_is_killed_is_replaced():
    async with Pool(score, "r", processes=1, timeout_seconds=10) as pool:
        (first,) = await pool.score([item("a")])
        os.kill(int(first.reward), signal.SIGKILL)
        (second,) = await pool.score([item("b")])
    assert second.error == "" and second.reward != first.reward


async def test_a_cancelled_request_is_not_scored():
    async with Pool(score, "r", processes=1, timeout_seconds=2) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pool.score([item("a", HANG), *(item(f"b{i}", HANG) for i in range(1000))])
        (result,) = await pool.score([item("c")])
    assert result.error == ""


async def test_closing_the_pool_kills_hanging_workers():
    before = psutil.Process().children()
    async with Pool(score, "r", processes=2, timeout_seconds=60) as pool:
        (result,) = await pool.score([item("a")])
        stuck = asyncio.create_task(pool.score([item("b", HANG), item("c", HANG)]))
        await asyncio.sleep(0)
        assert len(psutil.Process().children()) == len(before) + 2
    stuck.cancel()
    assert gone(int(result.reward))
    assert psutil.Process().children() == before, "all workers have ended and are reaped"


def test_workers_die_with_a_service_that_is_killed():
    reading, writing = os.pipe()
    service = os.fork()
    if service == 0:
        pid, connection = fork_worker(score)
        connection.sendall(b'[{"sample":"a","task":"","prompt":"","completion":"hang","finish":"","problem":{}}]\n')
        os.write(writing, str(pid).encode())
        signal.pause()
    worker = os.pidfd_open(int(os.read(reading, 20)))
    assert select.select([worker], [], [], 0)[0] == [], "the worker is alive"
    os.kill(service, signal.SIGKILL)
    os.waitpid(service, 0)
    try:
        assert select.select([worker], [], [], 10)[0] == [worker]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
