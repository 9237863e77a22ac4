"""rljob's routes in vLLM's server, with a fake engine: the steps of an update, and the one that failed is named."""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rljob.rollout.adapters.vllm.update_routes import JOIN, UPDATE, UpdateRoutes


class FakeEngine:
    """vLLM's engine. ``replies``: for each data-parallel replica what its workers answer. ``broken`` and ``slow`` have
    names of calls that raise, and that wait for ``go``."""

    def __init__(self, *replies):
        self.engine_core = self.renderer = self
        self.calls, self.version, self.broken, self.slow = [], "", {}, set()
        self.go = asyncio.Event()
        self._replies = replies or ([ok("d")],)

    async def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.slow:
            await self.go.wait()
        if name in self.broken:
            raise self.broken[name]

    async def call_utility_all_async(self, *call):
        await self._call(*call[:2], *call[3])
        return self._replies

    async def clear_mm_cache_async(self):
        await self._call("clear")

    async def pause_scheduler_async(self, mode, clear_cache):
        await self._call("pause", mode, clear_cache)

    async def resume_generation(self):
        await self._call("resume")

    async def update_weight_version(self, version):
        await self._call("version", version)
        self.version = version

    async def generate(self, prompt, sampling, name):
        await self._call("score", prompt)
        values = [None, *({token: SimpleNamespace(logprob=-float(token)), 0: None} for token in prompt[1:])]
        yield SimpleNamespace(prompt_logprobs=values)

    @property
    def steps(self):
        """Names of the calls."""
        return [call[1] if call[0] == "collective_rpc" else call[0] for call in self.calls]


class Agent:
    """A connection with one request, which the agent may leave."""

    def __init__(self, routes, engine, path, body):
        self.left = asyncio.Event()
        self._parts = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._sent = []
        scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
        self.task = asyncio.create_task(routes(scope, self._receive, self._send))

    async def _receive(self):
        if self._parts:
            return self._parts.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self._sent.append(message)

    async def answer(self):
        """Return status and body of the reply."""
        await self.task
        return self._sent[0]["status"], json.loads(self._sent[1]["body"])


async def post(engine, path, body):
    return await Agent(UpdateRoutes(None), engine, path, body).answer()


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def ok(digest):
    return {"digest": digest, "error": ""}


def failed(error):
    return {"digest": "", "error": error}


def order(mode="keep", clear=True, score=(), seconds=5.0):
    """Body of a whole update."""
    receive = {"update": {"names": ["a"]}, "weight_version": "0.7"}
    return {
        "pause": {"mode": mode, "clear_cache": clear},
        "receive": receive,
        "resume": True,
        "score": score,
        "seconds": seconds,
    }


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    """Stand-ins for the types of vLLM, whose import takes seconds."""
    inputs, sampling = ModuleType("vllm.inputs.engine"), ModuleType("vllm.sampling_params")
    inputs.tokens_input = lambda tokens: tokens
    sampling.SamplingParams = SimpleNamespace
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    for name in ("vllm", "vllm.inputs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, inputs.__name__, inputs)
    monkeypatch.setitem(sys.modules, sampling.__name__, sampling)


async def test_one_call_pauses_receives_commits_resumes_and_scores():
    engine = FakeEngine([ok("d"), ok("d")], [ok("d"), ok("d")])
    status, done = await post(engine, UPDATE, order(score=[[1, 2, 3], [4, 5]]))
    assert (status, done["failed"], done["error"], done["digest"]) == (200, "", "", "d")
    assert done["scores"] == [[-2.0, -3.0], [-5.0]]
    assert list(done["seconds"]) == ["pause", "receive", "resume", "score"]
    assert engine.steps == ["clear", "pause", "rljob_receive", "version", "resume", "score", "score"]
    assert engine.version == "0.7"
    (_, _, update) = engine.calls[2]
    assert update.pop("timeout_seconds") == pytest.approx(5.0, abs=1.0)
    assert update == {"names": ["a"]}


async def test_each_step_can_be_a_call_of_its_own():
    engine = FakeEngine()
    whole = order(score=[[1, 2]])
    for step in ("pause", "receive", "resume", "score"):
        body = {step: whole[step]} | ({"seconds": 5.0} if step == "receive" else {})
        status, done = await post(engine, UPDATE, body)
        assert (status, done["failed"], list(done["seconds"])) == (200, "", [step])
    assert engine.steps == ["clear", "pause", "rljob_receive", "version", "resume", "score"]


async def test_a_pause_that_keeps_the_cache_clears_nothing():
    engine = FakeEngine()
    await post(engine, UPDATE, {"pause": {"mode": "keep", "clear_cache": False}})
    assert engine.calls == [("pause", "keep", False)]


@pytest.mark.parametrize(
    ("broken", "step", "before"),
    [
        ("pause", "pause", ["clear", "pause"]),
        ("collective_rpc", "receive", ["clear", "pause", "rljob_receive"]),
        ("version", "receive", ["clear", "pause", "rljob_receive", "version"]),
        ("resume", "resume", ["clear", "pause", "rljob_receive", "version", "resume"]),
        ("score", "score", ["clear", "pause", "rljob_receive", "version", "resume", "score"]),
    ],
)
async def test_a_step_that_fails_is_named_and_none_follows(broken, step, before):
    engine = FakeEngine()
    engine.broken[broken] = KeyError("no")
    status, done = await post(engine, UPDATE, order(score=[[1, 2]]))
    assert (status, done["failed"], done["error"]) == (200, step, "KeyError: 'no'")
    assert engine.steps == before
    assert done["digest"] == ("d" if step in ("resume", "score") else "")  # only a committed update has one


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([[failed("KeyError: 'w'")]], "RuntimeError: KeyError: 'w'"),
        ([[ok("d"), failed("left")]], "RuntimeError: worker 1 of 2: left"),
        ([[ok("d")], [failed("left")]], "RuntimeError: worker 1 of 2: left"),
        ([[failed("a"), failed("b")]], "RuntimeError: worker 0 of 2: a; worker 1 of 2: b"),
        ([[ok("d"), ok("e")]], "RuntimeError: the engine's workers received different weights"),
    ],
)
async def test_an_update_that_a_worker_refuses_is_not_committed_and_does_not_resume(replies, message):
    engine = FakeEngine(*replies)
    _, done = await post(engine, UPDATE, order())
    assert (done["failed"], done["error"], done["digest"]) == ("receive", message, "")
    assert engine.version == ""
    assert engine.steps == ["clear", "pause", "rljob_receive"]


async def test_every_worker_of_every_replica_joins_or_the_call_fails():
    engine = FakeEngine([ok("")], [ok("")])
    assert await post(engine, JOIN, {"group": "nonce"}) == (200, None)
    assert engine.calls == [("collective_rpc", "rljob_join", {"group": "nonce"})]
    error = {"error": {"message": "RuntimeError: worker 1 of 2: left"}}
    assert await post(FakeEngine([ok("")], [failed("left")]), JOIN, {}) == (500, error)


async def test_a_pause_that_takes_too_long_fails_before_anything_is_received():
    engine = FakeEngine()
    engine.slow = {"pause"}
    _, done = await post(engine, UPDATE, order(seconds=0.01))
    assert (done["failed"], done["error"]) == ("pause", "RuntimeError: the engine did not pause within 0.01 s")
    assert engine.steps == ["clear", "pause"]


@pytest.mark.parametrize(("slow", "last"), [("pause", "pause"), ("collective_rpc", "rljob_receive")])
async def test_an_engine_whose_update_the_agent_gave_up_stays_paused(slow, last):
    engine = FakeEngine()
    engine.slow = {slow}
    agent = Agent(UpdateRoutes(None), engine, UPDATE, order())
    await until(lambda: last in engine.steps)
    agent.left.set()
    await asyncio.sleep(0)
    engine.go.set()
    _, done = await agent.answer()
    assert done["failed"] == {"pause": "receive", "rljob_receive": "resume"}[last]
    assert done["error"] == "RuntimeError: the agent does not wait any more"
    assert "resume" not in engine.steps


async def test_the_next_update_begins_after_the_steps_of_the_one_before():
    engine, routes = FakeEngine(), UpdateRoutes(None)
    engine.slow = {"collective_rpc"}
    first = Agent(routes, engine, UPDATE, order())
    await until(lambda: "rljob_receive" in engine.steps)
    first.left.set()
    second = [Agent(routes, engine, JOIN, {}), Agent(routes, engine, UPDATE, order())]
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.steps == ["clear", "pause", "rljob_receive"]
    engine.go.set()
    for agent in second:
        assert (await agent.answer())[0] == 200
    assert engine.steps[3:] == ["version", "rljob_join", "clear", "pause", "rljob_receive", "version", "resume"]


async def test_scores_do_not_wait_for_an_update():
    engine, routes = FakeEngine(), UpdateRoutes(None)
    engine.slow = {"pause"}
    update = Agent(routes, engine, UPDATE, order())
    await until(lambda: "pause" in engine.steps)
    _, done = await asyncio.wait_for(Agent(routes, engine, UPDATE, {"score": [[1, 2]]}).answer(), 60.0)
    assert done["scores"] == [[-2.0]]
    engine.go.set()
    await update.answer()
