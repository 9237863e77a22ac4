"""The order of an update inside SGLang's schedulers, with stand-ins for SGLang; `make sglang` runs the real one."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
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
PATIENCE = 10.0  # seconds until a worker that waits for another one fails the test


class Ranks:
    """The exchange of the workers of an engine, which are threads here: like a process group of torch."""

    def __init__(self, size):
        self.size, self._barrier, self._sent = size, Barrier(size), [None] * size

    def exchange(self, rank, own):
        self._sent[rank] = own
        self._barrier.wait(PATIENCE)
        everything = list(self._sent)
        self._barrier.wait(PATIENCE)
        assert len({*map(type, everything)}) == 1, "the messages of the workers do not belong together"
        return everything


class Group:
    """One worker's end of the exchange."""

    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank

    def barrier(self):
        self.ranks.exchange(self.rank, "barrier")


class Distributed:
    """Like ``torch.distributed``."""

    @staticmethod
    def get_rank(group):
        return group.rank

    @staticmethod
    def get_world_size(group):
        return group.ranks.size

    @staticmethod
    def all_gather_object(results, own, group):
        results[:] = group.ranks.exchange(group.rank, own)


class Session(msgspec.Struct):
    """Like SGLang's session of an update."""

    loaded_weights: bool = False


class Manager:
    """Like SGLang's SchedulerWeightUpdaterManager; ``calls`` holds what happened, ``breaks`` is the call that fails."""

    def __init__(self, group):
        self.calls, self._session, self.flushes, self.tp_cpu_group, self.breaks = [], None, (True, ""), group, ""
        load = SimpleNamespace(load_weights_from_distributed=lambda tensors: (True, ""))
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(weight_updater=load, device="cpu"))

    def begin_weight_update(self, request):
        self._call("begin")
        self._session = Session()
        self.tp_cpu_group.barrier()

    def end_weight_update(self, request):
        assert self._session.loaded_weights, "SGLang would load again"
        self._call("end")
        self._session = None
        self.tp_cpu_group.barrier()

    def flush_cache_after_weight_update(self, request, success, message):
        self._call("flush")
        return self.flushes

    def record_weight_version_after_update(self, version):
        self._call(version)

    def _call(self, name):
        if self.breaks == name:
            raise ValueError(f"{name} failed")
        self.calls.append(name)


class Receiver:
    """Like rljob's WeightReceiver; ``fails`` is raised by the next call."""

    def __init__(self, device):
        self.device, self.fails, self.joined, self.digest, self.left = device, None, [], "abc", Event()

    def join(self, *arguments):
        self.joined.append(arguments)
        if self.fails is not None:
            raise self.fails

    def receive(self, parameters, load, timeout_seconds):
        load([("w", None)])
        if self.fails is not None:
            raise self.fails

    def leave(self):
        self.joined.append("left")
        self.left.set()


class Engine:
    """The workers of an engine, which have joined a group. Each has a manager with rljob's receiver; SGLang calls them
    at the same time."""

    def __init__(self, module, workers, threads):
        ranks, made, self._threads, self.managers = Ranks(workers), [], threads, []
        module.WeightReceiver = lambda device: made.append(Receiver(device)) or made[-1]
        for rank in range(workers):
            kind = type("Patched", (Manager,), {})
            module.install(kind)
            self.managers.append(kind(Group(ranks, rank)))
        assert self.join().success
        self.receivers = sorted(made, key=lambda receiver: receiver.joined[0][1])
        for rank, receiver in enumerate(self.receivers):
            assert (receiver.device, receiver.joined[0][1:]) == ("cpu", (1 + rank, "gloo", 10, 2.0))

    def join(self):
        place = {"master_address": "10.0.0.1", "master_port": 7, "world_size": 1 + len(self.managers)}
        order = as_text(SglangGroup("nonce", 10, 2.0))
        request = SimpleNamespace(group_name=order, rank_offset=1, backend="gloo", **place)
        return self._all(lambda manager: manager.init_weights_update_group(request))

    def update(self, version="0.1"):
        tensors = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}
        request = SimpleNamespace(group_name=as_text(SglangRound(2.0)), weight_version=version, **tensors)
        return self._all(lambda manager: manager.update_weights_from_distributed(request))

    def calls(self):
        """Return the calls of SGLang's managers, which are the same in all workers."""
        assert [manager.calls for manager in self.managers] == [self.managers[0].calls] * len(self.managers)
        return self.managers[0].calls

    def _all(self, call):
        answers = list(self._threads.map(call, self.managers))
        assert answers == [answers[0]] * len(answers), "SGLang answers with that of the first"
        return answers[0]


@pytest.fixture
def module(monkeypatch):
    """The module, with stand-ins for SGLang and for the exchange of the workers."""
    messages = ModuleType("sglang.srt.managers.io_struct")
    for name in MESSAGES:
        setattr(messages, name, SimpleNamespace)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, messages.__name__, messages)
    sglang_receiver = importlib.import_module("rljob.rollout.adapters.sglang.sglang_receiver")
    monkeypatch.setattr(sglang_receiver, "dist", Distributed)
    yield sglang_receiver
    del sys.modules[sglang_receiver.__name__]


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def engine(module, threads, request):
    return Engine(module, getattr(request, "param", 2), threads)


with_one_worker_and_two = pytest.mark.parametrize("engine", [1, 2], indirect=True)


@with_one_worker_and_two
def test_an_update_is_labelled_after_it_was_compared_and_finished(engine):
    answer = engine.update()
    assert (answer.success, answer.message) == (True, "abc")
    assert engine.calls() == ["begin", "end", "flush", "0.1"]


@pytest.mark.parametrize("engine", [1], indirect=True)
def test_the_error_of_an_only_worker_is_its_answer(engine):
    engine.receivers[0].fails = ValueError("other bytes")
    answer = engine.update()
    assert (answer.success, answer.message) == (False, "ValueError: other bytes")


@pytest.mark.parametrize("failing", [0, 1])
def test_no_worker_finishes_what_another_one_refuses(engine, failing):
    """The next update continues the session in all workers."""
    engine.receivers[failing].fails = ValueError("other bytes")
    answer = engine.update()
    assert (answer.success, answer.message) == (False, f"worker {failing} of 2: ValueError: other bytes")
    assert engine.calls() == ["begin"]
    assert [receiver.joined[-1] for receiver in engine.receivers] == ["left", "left"], "the sender fails at once"
    engine.receivers[failing].fails = None
    assert engine.update("0.2").success
    assert engine.calls() == ["begin", "end", "flush", "0.2"]


def test_a_worker_that_fails_leaves_the_group_before_it_waits_for_the_others(engine):
    """They wait for it in the group, until it leaves or their time is over."""
    engine.receivers[1].fails = ValueError("other bytes")
    waited = []
    engine.receivers[0].receive = lambda *arguments: waited.append(engine.receivers[1].left.wait(PATIENCE))
    assert engine.update().message == "worker 1 of 2: ValueError: other bytes"
    assert waited == [True]


def test_no_worker_finishes_other_weights_than_another_one(engine):
    engine.receivers[1].digest = "def"
    answer = engine.update()
    assert (answer.success, answer.message) == (False, "the engine's workers received different weights")
    assert engine.calls() == ["begin"]


def test_no_worker_is_in_a_group_that_another_one_did_not_join(engine):
    engine.receivers[1].fails = RuntimeError("too late")
    answer = engine.join()
    assert (answer.success, answer.message) == (False, "worker 1 of 2: RuntimeError: too late")
    assert [receiver.joined[-1] for receiver in engine.receivers] == ["left", "left"]


@with_one_worker_and_two
def test_a_tensor_that_sglang_does_not_load_fails_the_update(engine):
    updater = engine.managers[-1].tp_worker.model_runner.weight_updater
    updater.load_weights_from_distributed = lambda tensors: (False, "wrong shape")
    answer = engine.update()
    assert not answer.success and answer.message.endswith("RuntimeError: wrong shape")
    assert engine.calls() == ["begin"]


@with_one_worker_and_two
def test_an_update_whose_old_cache_stays_in_a_worker_has_no_label(engine):
    engine.managers[-1].flushes = (False, "requests are still running")
    answer = engine.update()
    assert not answer.success and answer.message.endswith("RuntimeError: requests are still running")
    assert engine.calls() == ["begin", "end", "flush"]


@pytest.mark.parametrize("call", ["begin", "end"])
@pytest.mark.parametrize("engine", [1], indirect=True)
def test_a_call_of_sglang_that_fails_is_an_answer_of_an_only_worker(engine, call):
    engine.managers[0].breaks = call
    assert engine.update().message == f"ValueError: {call} failed"


@pytest.mark.parametrize("call", ["begin", "end"])
def test_a_worker_that_misses_a_barrier_ends(module, engine, monkeypatch, call):
    """The others wait for it there."""

    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(module.os, "_exit", end)
    for manager in engine.managers:
        manager.breaks = call
    with pytest.raises(Ended, match="1"):
        engine.update()
