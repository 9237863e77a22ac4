"""The session protocol: numbered steps, repeated requests, expiry, limits, environments that fail or hang."""

import asyncio
import gc
import threading
import time

import msgspec
import pytest

from rljob.environments import episode, metrics
from rljob.environments.episode import Calls
from rljob.environments.sdk_types import EpisodeError
from rljob.environments.session_table import SessionTable
from rljob.protocol.episode_messages import Observation, OpenSession, StepRequest
from rljob.protocol.service_routes import RequestRejectedError


class Counter:
    """Counts its steps; the action says what to do."""

    def __init__(self):
        self.steps = 0

    def reset(self, seed, row):
        if "fail" in row:
            raise KeyError("missing")
        return f"seed {seed}", {"metrics": {"row": row.get("n", 0)}}

    def step(self, action):
        self.steps += 1
        match action:
            case "raise":
                raise RuntimeError("boom")
            case "nan":
                return "", float("nan"), False, False, {}
            case "long":
                return "x" * (1 << 20 | 1), 0.0, False, False, {}
            case "bytes":
                return b"", 0.0, False, False, {}
            case "short":
                return "", 0.0
            case "metric":
                return "", 0.0, False, False, {"metrics": {"a": "many"}}
            case "infinite":
                return "", 0.0, False, False, {"metrics": {"a": float("inf")}}
        info = {"metrics": {"steps": self.steps, "valid": 1}, "metrics_agg_mode": {"valid": "mean"}}
        return f"step {self.steps}", 0.5, action == "end", action == "cut", info


class InLoop(Counter):
    in_event_loop = True


class Async(Counter):
    closed = 0

    async def reset(self, seed, row):
        return Counter.reset(self, seed, row)

    async def step(self, action):
        if action == "hang":
            await asyncio.sleep(3600)
        if action == "timeout":
            raise TimeoutError("of its own")
        await asyncio.sleep(0)
        return Counter.step(self, action)

    async def close(self):
        type(self).closed += 1


KINDS = [Counter, InLoop, Async]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
async def table(request):
    Async.closed = 0
    made = SessionTable(request.param, Calls("maze", 60.0), 3, 60.0)
    yield made
    await made.close_all()


async def opened(table, name="a", seed=1, **row):
    return msgspec.json.decode(await table.open(OpenSession(name, seed, row)), type=Observation)


async def stepped(table, step, action="go", name="a"):
    return msgspec.json.decode(await table.step(name, StepRequest(step, action)), type=Observation)


async def test_an_episode_is_played(table):
    assert await opened(table, n=2) == Observation(0, "seed 1", metrics={"row": 2.0})
    assert await stepped(table, 1) == Observation(1, "step 1", 0.5, metrics={"steps": 1.0}, means={"valid": 1.0})
    last = await stepped(table, 2, "end")
    assert (last.terminated, last.truncated, last.ended) == (True, False, True)
    with pytest.raises(RequestRejectedError, match="the episode of session a ended at step 2") as caught:
        await stepped(table, 3)
    assert caught.value.status == 409


async def test_a_repeated_request_has_no_second_effect(table):
    before = metrics.STEPS._value.get()
    assert await opened(table) == await opened(table)
    first = await stepped(table, 1)
    assert await stepped(table, 1) == first
    assert (await stepped(table, 2, "cut")).metrics == {"steps": 2.0}
    assert (await stepped(table, 2, "cut")).truncated  # also after the end
    assert metrics.STEPS._value.get() - before == 2


async def test_requests_that_are_repeated_at_the_same_time_make_one_step(table):
    await opened(table)
    found = await asyncio.gather(*(stepped(table, 1) for _ in range(5)))
    assert [each.metrics["steps"] for each in found] == [1.0] * 5


@pytest.mark.parametrize("step", [0, 2, 3, -1])
async def test_steps_out_of_order_are_refused(table, step):
    await opened(table)
    await stepped(table, 1)
    if step == 2:
        step = 1  # the same number with another action is not a repetition
    with pytest.raises(RequestRejectedError, match="is not next") as caught:
        await stepped(table, step, "other")
    assert caught.value.status == 409
    assert (await stepped(table, 2)).metrics == {"steps": 2.0}


async def test_a_name_is_used_once(table):
    await opened(table)
    with pytest.raises(RequestRejectedError, match="session a exists"):
        await opened(table, seed=2)
    with pytest.raises(RequestRejectedError, match="there is no session b") as caught:
        await stepped(table, 1, name="b")
    assert caught.value.status == 404


async def test_more_sessions_than_the_limit_wait(table):
    for name in "abc":
        await opened(table, name)
    with pytest.raises(RequestRejectedError, match="there are 3 sessions") as caught:
        await opened(table, "d")
    assert caught.value.status == 429 and caught.value.headers == {"Retry-After": "1"}
    table.close("a")
    await opened(table, "d")
    assert len(table) == 3


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        ("raise", "environment maze: step raised RuntimeError: boom"),
        ("nan", "environment maze returned the reward nan"),
        ("long", "environment maze returned an observation of 1,048,577 characters"),
        ("bytes", "an observation is of type bytes, not text"),
        ("short", "step must return"),
        ("metric", "a reward or metric is not a number"),
        ("infinite", "returned the metric a = inf"),
    ],
)
async def test_an_environment_that_fails_ends_its_episode_only(table, action, sentence):
    await opened(table)
    await opened(table, "b")
    for _ in range(2):  # the error is the reply, so it can be repeated
        with pytest.raises(EpisodeError, match=sentence):
            await stepped(table, 1, action)
    with pytest.raises(RequestRejectedError, match="ended at step 1"):
        await stepped(table, 2)
    assert (await stepped(table, 1, name="b")).observation == "step 1"


async def test_a_reset_that_fails_is_reported(table):
    with pytest.raises(EpisodeError, match="environment maze: reset raised KeyError: 'missing'"):
        await opened(table, fail=1)


async def test_idle_sessions_expire_the_oldest_first(table, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    await opened(table, "a")
    await opened(table, "b")
    now = 130.0
    await stepped(table, 1, name="a")
    now = 161.0
    table.expire()
    assert len(table) == 1 and (await stepped(table, 2, name="a")).step == 2
    with pytest.raises(RequestRejectedError, match="expired"):
        await stepped(table, 1, name="b")


async def test_ended_and_failed_episodes_are_closed_once():
    Async.closed = 0
    table = SessionTable(Async, Calls("maze", 60.0), 9, 60.0)
    for name, action in {"a": "end", "b": "raise", "c": "go"}.items():
        await opened(table, name)
        try:
            await stepped(table, 1, action, name)
        except EpisodeError:
            assert name == "b"
    table.close("a")
    await table.close_all()
    assert Async.closed == 3 and len(table) == 0


async def test_an_async_step_that_hangs_is_cancelled_and_others_go_on():
    table = SessionTable(Async, Calls("maze", 0.05), 9, 60.0)
    await opened(table)
    await opened(table, "b")
    hanging = asyncio.create_task(stepped(table, 1, "hang"))
    await asyncio.sleep(0)
    assert (await stepped(table, 1, name="b")).step == 1
    with pytest.raises(EpisodeError, match=r"step took more than 0.05 s and was cancelled") as caught:
        await hanging
    assert caught.value.hung
    await opened(table, "c")  # replaces it
    with pytest.raises(EpisodeError, match="step raised TimeoutError: of its own"):
        await stepped(table, 1, "timeout", "c")


async def test_a_step_in_a_thread_that_hangs_is_abandoned(monkeypatch):
    release, ended = threading.Event(), []

    class Hangs(Counter):
        def step(self, action):
            if action == "hang":
                release.wait(30)
            return Counter.step(self, action)

        def close(self):
            ended.append(self)

    monkeypatch.setattr(episode.os, "_exit", lambda code: ended.append(code))
    monkeypatch.setattr(episode, "MAX_ABANDONED", 1)
    table = SessionTable(Hangs, Calls("maze", 0.05), 9, 60.0)
    for name in "abc":
        await opened(table, name)
    for name in "ab":
        with pytest.raises(EpisodeError, match="took more than"):
            await stepped(table, 1, "hang", name)
        assert (await stepped(table, 1 if name == "a" else 2, name="c")).ended is False
    assert ended == [1]  # the second abandoned thread ends the process; no hanging environment is closed
    release.set()
    await table.close_all()


async def test_a_step_goes_on_without_its_client():
    table = SessionTable(Async, Calls("maze", 60.0), 9, 60.0)
    await opened(table)
    first = asyncio.create_task(stepped(table, 1))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await stepped(table, 1)).metrics == {"steps": 1.0}


async def test_closing_a_session_ends_the_step_that_runs():
    table = SessionTable(Async, Calls("maze", 60.0), 9, 60.0)
    await opened(table)
    hanging = asyncio.create_task(stepped(table, 1, "hang"))
    await asyncio.sleep(0.01)
    table.close("a")
    with pytest.raises(RequestRejectedError, match="was closed during step 1"):
        await hanging


async def test_closed_sessions_are_released():
    table = SessionTable(InLoop, Calls("maze", 60.0), 9, 60.0)
    await opened(table)
    table.close("a")
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is InLoop]  # isinstance would ask objects of torch
