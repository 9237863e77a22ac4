"""A weight update step by step, each step failing in turn: mixed weights never generate."""

import asyncio

import pytest

from rljob.protocol.agent_protocol import PrepareWeights
from rljob.protocol.shared_messages import Probe
from rljob.rollout import weight_update
from rljob.rollout.adapters.base import EngineGoneError
from rljob.rollout.adapters.update_steps import StepError, UpdateOutput
from rljob.rollout.weight_update import UpdateError, WeightUpdater

STEPS = ["pause", "receive", "resume", "score"]


class FakeEngine:
    def __init__(self):
        self.calls, self.broken, self.slow = [], {}, set()
        self.scores = {(1, 2, 3): [-1.0, -2.0], (4, 5): [-3.0]}

    async def _step(self, name, answer=None):
        self.calls.append(name)
        if name in self.broken:
            raise self.broken[name]
        if name in self.slow:
            await asyncio.sleep(3600)
        return answer

    def join(self, update, seconds):
        return self._step("join")

    def pause(self, in_flight):
        return self._step("pause")

    def receive(self, update, seconds):
        return self._step("receive", "d1")

    def resume(self):
        return self._step("resume")

    def score(self, tokens):
        return self._step("score", self.scores[tuple(tokens)])


def order(number=1, group="g", probe=None, seconds=5.0):
    probe = probe or Probe([[1, 2, 3], [4, 5]], [[-1.0, -2.25], [-3.0]])
    return PrepareWeights(
        number, 0, 7, group, "127.0.0.1", 1, 2, "gloo", 1 << 20, [], probe, "keep", seconds, engine="main-1"
    )


@pytest.fixture
def engine():
    return FakeEngine()


async def test_an_update_runs_its_steps_in_order_and_returns_the_ack(engine):
    ack = await WeightUpdater(engine).run(order())
    assert engine.calls == ["join", "pause", "receive", "resume", "score", "score"]
    assert (ack.update, ack.lineage, ack.version, ack.digest, ack.probe_error) == (1, 0, 7, "d1", 0.25)
    assert ack.probe_mean == pytest.approx(0.25 / 3)


async def test_the_ack_says_how_long_the_engine_paused_and_generates_again(engine, monkeypatch):
    took = {"pause": 1.0, "receive": 2.0, "resume": 4.0, "score": 8.0}

    async def carry_out(client, update, seconds):
        return UpdateOutput("d1", [[-1.0, -2.0], [-3.0]], took)

    monkeypatch.setattr(weight_update, "carry_out", carry_out)
    ack = await WeightUpdater(engine).run(order())
    assert ack.pause_seconds == 7
    assert 8 <= ack.seconds_since_resume < 8.5


async def test_a_group_is_joined_once(engine):
    updater = WeightUpdater(engine)
    for group in ("g", "g", "h"):
        await updater.run(order(group=group))
    assert engine.calls.count("join") == 2


async def test_without_a_probe_the_error_is_minus_one(engine):
    ack = await WeightUpdater(engine).run(order(probe=Probe([], [])))
    assert ack.probe_error == ack.probe_mean == -1


@pytest.mark.parametrize("step", ["join", "pause"])
async def test_an_engine_resumes_after_a_failure_before_loading(engine, step):
    updater = WeightUpdater(engine)
    engine.broken[step] = EngineGoneError("no")
    with pytest.raises(UpdateError, match="no"):
        await updater.run(order())
    assert not updater.tainted
    assert engine.calls[-1] == "resume"


async def test_mixed_weights_stay_paused_until_an_update_succeeds(engine):
    updater = WeightUpdater(engine)
    engine.broken["receive"] = EngineGoneError("the sender died")
    for step in ("receive", "join", "pause"):  # however the next attempts fail
        engine.broken = {step: EngineGoneError("no")}
        with pytest.raises(UpdateError):
            await updater.run(order())
        assert updater.tainted
        assert "resume" not in engine.calls
    engine.broken = {}
    await updater.run(order())
    assert not updater.tainted
    assert engine.calls.count("resume") == 1


async def test_after_a_failed_round_even_the_same_group_is_joined_again(engine):
    updater = WeightUpdater(engine)
    engine.broken = {"receive": EngineGoneError("no")}
    with pytest.raises(UpdateError):
        await updater.run(order())
    engine.broken = {}
    await updater.run(order())
    assert engine.calls.count("join") == 2


@pytest.mark.parametrize(("step", "tainted"), [("pause", False), ("receive", True)])
async def test_a_step_that_takes_too_long_fails_the_update(engine, monkeypatch, step, tainted):
    monkeypatch.setattr(weight_update, "GRACE_SECONDS", 0.01)
    updater = WeightUpdater(engine)
    engine.slow = {step}
    with pytest.raises(UpdateError, match=r"longer than 0\.02 s"):
        await updater.run(order(seconds=0.02))
    assert updater.tainted == tainted
    assert ("resume" in engine.calls) != tainted


async def test_a_probe_of_another_length_fails_the_update(engine):
    with pytest.raises(UpdateError, match="differ in length"):
        await WeightUpdater(engine).run(order(probe=Probe([[1, 2, 3]], [[-1.0]])))


@pytest.mark.parametrize("step", ["join", "pause", "receive", "resume", "score"])
async def test_any_exception_of_an_engine_s_client_fails_the_update(engine, step):
    updater = WeightUpdater(engine)
    engine.broken[step] = KeyError("weights")
    with pytest.raises(UpdateError, match="the engine's client raised KeyError: 'weights'"):
        await updater.run(order())
    assert updater.tainted == (step == "receive")


class OneCall(FakeEngine):
    """An engine whose server carries out the steps by itself; ``broken`` has the steps, or ``update``."""

    async def update_in_one_call(self, update, seconds):
        await self._step("update")
        for step in STEPS:
            if step in self.broken:
                raise StepError(step, str(self.broken[step]))
        scores = [self.scores[tuple(tokens)] for tokens in update.probe.token_ids]
        return UpdateOutput("d1", scores, dict.fromkeys(STEPS, 0.1))


@pytest.fixture
def one_call():
    return OneCall()


async def test_an_engine_with_an_update_in_one_call_gets_no_steps(one_call):
    updater = WeightUpdater(one_call)
    for number in (1, 2):
        ack = await updater.run(order(number))
    assert one_call.calls == ["join", "update", "update"]
    assert (ack.digest, ack.probe_error) == ("d1", 0.25)
    assert updater.seconds == dict.fromkeys(STEPS, 0.1)
    assert not updater.tainted


@pytest.mark.parametrize(
    ("step", "tainted", "calls"),
    [
        ("pause", False, ["join", "update", "resume"]),
        ("receive", True, ["join", "update"]),
        ("resume", False, ["join", "update", "resume"]),
        ("score", False, ["join", "update", "resume"]),
        ("update", True, ["join", "update"]),  # no answer: the weights may be a mixture
    ],
)
async def test_the_step_that_failed_in_the_call_decides_whether_the_engine_resumes(one_call, step, tainted, calls):
    updater = WeightUpdater(one_call)
    one_call.broken = {step: EngineGoneError("no")}
    with pytest.raises(UpdateError, match="no"):
        await updater.run(order())
    assert (updater.tainted, one_call.calls) == (tainted, calls)


async def test_mixed_weights_stay_paused_if_the_next_call_fails_to_pause(one_call):
    updater = WeightUpdater(one_call)
    for step in ("receive", "pause"):
        one_call.broken = {step: EngineGoneError("no")}
        with pytest.raises(UpdateError):
            await updater.run(order())
        assert updater.tainted
    assert "resume" not in one_call.calls
    one_call.broken = {}
    await updater.run(order())
    assert not updater.tainted


async def test_an_engine_that_does_not_answer_the_call_in_time_counts_as_mixed(one_call, monkeypatch):
    monkeypatch.setattr(weight_update, "GRACE_SECONDS", 0.01)
    updater = WeightUpdater(one_call)
    one_call.slow = {"update"}
    with pytest.raises(UpdateError, match=r"longer than 0\.02 s"):
        await updater.run(order(seconds=0.02))
    assert updater.tainted
    assert "resume" not in one_call.calls
