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
    """The reward is the worker's process id; some answers are harmful."""
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


async def test_verdicts_come_in_the_order_asked_for():
    async with Pool(score, "r", processes=2, timeout_seconds=10) as pool:
        names = [f"g{i}.0" for i in range(200)]
        assert [verdict.sample for verdict in await pool.score([item(name) for name in names])] == names


async def test_requests_at_once_share_all_workers():
    async with Pool(score, "r", processes=2, timeout_seconds=10) as pool:
        verdicts = await asyncio.gather(*(pool.score([item(f"g{r}.{i}") for i in range(50)]) for r in range(4)))
    assert [[v.sample for v in some] for some in verdicts] == [[f"g{r}.{i}" for i in range(50)] for r in range(4)]
    assert len({v.reward for some in verdicts for v in some}) == 2


async def test_a_sample_that_overruns_costs_itself_alone():
    before = metrics.TIMEOUTS._value.get()
    async with Pool(score, "slow", processes=1, timeout_seconds=2) as pool:
        first, bad, *rest = await pool.score([item("a"), item("b", HANG), item("c"), item("d")])
    assert bad == Score("b", 0.0, {}, "reward slow took longer than 2 s")
    assert [(v.sample, v.error) for v in (first, *rest)] == [("a", ""), ("c", ""), ("d", "")]
    assert first.reward != rest[0].reward == rest[1].reward, "the worker was to be replaced, once"
    assert gone(int(first.reward))
    assert metrics.TIMEOUTS._value.get() == before + 1


async def test_the_limit_is_for_each_sample_not_for_a_chunk():
    async with Pool(score, "r", processes=1, timeout_seconds=2) as pool:
        verdicts = await pool.score([item(f"g{i}.0", NAP) for i in range(22)])
    assert [v.error for v in verdicts] == [""] * 22
    assert len({v.reward for v in verdicts}) == 1, "together they took longer than the limit, each did not"


async def test_a_sample_that_kills_its_worker_is_tried_twice_and_is_an_error_then():
    before = metrics.CRASHES._value.get()
    async with Pool(score, "crash", processes=1, timeout_seconds=10) as pool:
        bad, good = await pool.score([item("a", DIE), item("b")])
    assert bad.error == "reward crash: the worker exited (SIGSEGV) twice on this sample"
    assert good.error == ""
    assert metrics.CRASHES._value.get() == before + 2


async def test_a_worker_that_is_killed_while_idle_costs_nothing():
    async with Pool(score, "r", processes=1, timeout_seconds=10) as pool:
        (first,) = await pool.score([item("a")])
        os.kill(int(first.reward), signal.SIGKILL)
        (second,) = await pool.score([item("b")])
    assert second.error == "" and second.reward != first.reward


async def test_a_request_that_is_given_up_is_not_scored():
    async with Pool(score, "r", processes=1, timeout_seconds=2) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pool.score([item("a", HANG), *(item(f"b{i}", HANG) for i in range(1000))])
        (verdict,) = await pool.score([item("c")])
    assert verdict.error == ""


async def test_closing_the_pool_ends_workers_that_are_stuck():
    before = psutil.Process().children()
    async with Pool(score, "r", processes=2, timeout_seconds=60) as pool:
        (verdict,) = await pool.score([item("a")])
        stuck = asyncio.create_task(pool.score([item("b", HANG), item("c", HANG)]))
        await asyncio.sleep(0)
        assert len(psutil.Process().children()) == len(before) + 2
    stuck.cancel()
    assert gone(int(verdict.reward))
    assert psutil.Process().children() == before, "one is left, if only to be reaped"


def test_workers_die_with_a_service_that_is_killed():
    told, tell = os.pipe()
    service = os.fork()
    if service == 0:
        pid, connection = fork_worker(score)
        connection.sendall(b'[{"sample":"a","task":"","prompt":"","completion":"hang","finish":"","problem":{}}]\n')
        os.write(tell, str(pid).encode())
        signal.pause()
    worker = os.pidfd_open(int(os.read(told, 20)))
    assert select.select([worker], [], [], 0)[0] == [], "the worker was to be alive"
    os.kill(service, signal.SIGKILL)
    os.waitpid(service, 0)
    try:
        assert select.select([worker], [], [], 10)[0] == [worker]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
