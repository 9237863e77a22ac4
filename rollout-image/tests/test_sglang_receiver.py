"""The order of an update inside SGLang's scheduler, with stand-ins for SGLang; `make sglang` runs the real one."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from rljob.rollout.adapters.sglang.sglang_orders import SglangGroup, SglangRound, as_text

MESSAGES = (
    "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
    "InitWeightsUpdateGroupReqOutput",
    "UpdateWeightsFromDistributedReqOutput",
)


class Session(msgspec.Struct):
    """Like SGLang's session of an update."""

    loaded_weights: bool = False


class Manager:
    """Like SGLang's SchedulerWeightUpdaterManager; ``calls`` holds what happened."""

    def __init__(self):
        self.calls, self._session, self.flushes = [], None, (True, "")
        load = SimpleNamespace(load_weights_from_distributed=lambda tensors: (True, ""))
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=load, device="cpu"))

    def begin_weight_update(self, request):
        self.calls.append("begin")
        self._session = Session()

    def end_weight_update(self, request):
        assert self._session.loaded_weights, "SGLang would load again"
        self.calls.append("end")
        self._session = None

    def flush_cache_after_weight_update(self, request, success, message):
        self.calls.append("flush")
        return self.flushes

    def record_weight_version_after_update(self, version):
        self.calls.append(version)


class Receiver:
    """Like rljob's WeightReceiver; ``fails`` is raised by the next call."""

    digest = "abc"

    def __init__(self, device):
        self.device, self.fails, self.joined = device, None, []

    def join(self, *arguments):
        self.joined.append(arguments)

    def receive(self, parameters, load, timeout_seconds):
        load([("w", None)])
        if self.fails is not None:
            raise self.fails

    def leave(self):
        self.joined.append("left")


@pytest.fixture
def receiving(monkeypatch):
    """A manager with rljob's receiver, which has joined a group, and its stand-in of WeightReceiver."""
    messages = ModuleType("sglang.srt.managers.io_struct")
    for name in MESSAGES:
        setattr(messages, name, SimpleNamespace)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, messages.__name__, messages)
    sglang_receiver = importlib.import_module("rljob.rollout.adapters.sglang.sglang_receiver")
    made = []
    monkeypatch.setattr(sglang_receiver, "WeightReceiver", lambda device: made.append(Receiver(device)) or made[0])
    kind = type("Patched", (Manager,), {})
    sglang_receiver.install(kind)
    manager = kind()
    group = as_text(SglangGroup("nonce", 10, 2.0))
    place = {"master_address": "10.0.0.1", "master_port": 7, "world_size": 2}
    joined = manager.init_weights_update_group(
        SimpleNamespace(group_name=group, rank_offset=1, backend="gloo", **place)
    )
    assert joined.success
    (receiver,) = made
    assert (receiver.device, receiver.joined[0][1:]) == ("cpu", (1, "gloo", 10, 2.0))
    yield manager, receiver
    del sys.modules[sglang_receiver.__name__]


def update(version="0.1"):
    tensors = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}
    return SimpleNamespace(group_name=as_text(SglangRound(2.0)), weight_version=version, **tensors)


def test_an_update_is_labelled_after_it_was_compared_and_finished(receiving):
    manager, _ = receiving
    answer = manager.update_weights_from_distributed(update())
    assert (answer.success, answer.message) == (True, "abc")
    assert manager.calls == ["begin", "end", "flush", "0.1"]


def test_a_failed_update_is_not_finished_and_the_next_one_continues_its_session(receiving):
    manager, receiver = receiving
    receiver.fails = ValueError("other bytes")
    answer = manager.update_weights_from_distributed(update())
    assert (answer.success, answer.message) == (False, "ValueError: other bytes")
    assert manager.calls == ["begin"]
    assert receiver.joined[-1] == "left", "the other members fail at once"
    receiver.fails = None
    assert manager.update_weights_from_distributed(update("0.2")).success
    assert manager.calls == ["begin", "end", "flush", "0.2"]


def test_a_tensor_that_sglang_does_not_load_fails_the_update(receiving):
    manager, _ = receiving
    manager.tp_worker.model_runner.weight_updater.load_weights_from_distributed = lambda tensors: (False, "wrong shape")
    answer = manager.update_weights_from_distributed(update())
    assert (answer.success, answer.message) == (False, "RuntimeError: wrong shape")
    assert manager.calls == ["begin"]


def test_an_update_whose_old_cache_stays_has_no_label(receiving):
    manager, _ = receiving
    manager.flushes = (False, "requests are still running")
    answer = manager.update_weights_from_distributed(update())
    assert (answer.success, answer.message) == (False, "RuntimeError: requests are still running")
    assert manager.calls == ["begin", "end", "flush"]
