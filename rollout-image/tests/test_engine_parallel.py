"""Real engines with several workers behind the agent: every worker receives the weights and loads its part.

Those of SGLang need its environment: `make sglang`.
"""

import asyncio
import os
import signal
import threading

import psutil
import pytest
from served_engine import LONGEST, Trainer, ints, running
from sglang_with_faults import BYTES, FAULT_FILE, LATE, write_interpreter

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import EngineCrashed, WeightFailed
from rljob.protocol.environment import SGLANG_PYTHON
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout import server_shared_memory
from rljob.rollout.adapters.sglang import main as sglang_main
from rljob.rollout.adapters.sglang.sglang_adapter import SglangAdapter
from rljob.rollout.adapters.vllm import server_key
from rljob.rollout.adapters.vllm.adapter import VllmAdapter
from rljob.rollout.conformance import CHECKS, corrupted_weights_generate_no_token
from rljob.rollout.engine_under_test import EngineUnderTest
from rljob.trainer.weight_sender import WeightTransferError

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

IN_FLIGHT_TOKENS = 300  # a second or more
SIZES = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "data": {"data": 2}, "sglang": {"tensor": 2}}
ADAPTERS = {"vllm": VllmAdapter, "sglang": SglangAdapter}
KEYS = {"vllm": server_key.KEY_VARIABLE, "sglang": sglang_main.KEY_VARIABLE}
WORKERS = ("VLLM::Worker", "sglang::scheduler")
"""Begins of the titles of processes that hold weights; the rank follows."""
THOROUGH = bool(os.environ.get("RLJOB_THOROUGH"))  # make thorough; all sizes and checks take minutes
with_sglang = pytest.param(
    "sglang",
    marks=pytest.mark.skipif(SGLANG_PYTHON not in os.environ, reason="needs the test environment of SGLang"),
)
TESTED = [*(["tensor", "pipeline", "data"] if THOROUGH else ["tensor"]), with_sglang]
with_tensor_parallelism = pytest.mark.parametrize("run", ["tensor", with_sglang], indirect=True, scope="module")
"""For tests that take long, and of which vLLM's other workers show no more."""
only_sglang = pytest.mark.parametrize("run", [with_sglang], indirect=True, scope="module")


@pytest.fixture(scope="module", params=TESTED)
async def run(request, tmp_path_factory, make_coordinator, manifest):
    path = tmp_path_factory.mktemp("engine")
    sizes, engine = SIZES[request.param], "sglang" if request.param == "sglang" else "vllm"
    settings = {"maxModelLength": LONGEST, "parallelism": sizes, "kvCacheBytes": 64 << 20}
    text = manifest("job://model", engine=engine, **settings)
    trainer = Trainer(path / "model", workers=2)
    with pytest.MonkeyPatch.context() as patch:
        if engine == "sglang":
            write_interpreter(path / "python", os.environ[SGLANG_PYTHON])
            patch.setenv(SGLANG_PYTHON, str(path / "python"))
            patch.setenv(FAULT_FILE, str(path / "fault"))
        async with running(path, make_coordinator(), trainer, text) as run:
            run.kind, run.fault = engine, path / "fault"
            yield run


def name_of(check):
    return check.__name__


def family(run):
    """Return the server and its processes."""
    server = run.server()
    return [server, *server.children(recursive=True)]


def workers(run):
    """Return the processes that hold weights, by rank."""
    titles = {" ".join(process.cmdline()): process for process in family(run)}
    return [titles[title] for title in sorted(titles) if title.startswith(WORKERS)]


async def test_each_update_reaches_every_worker(run):
    assert len(workers(run)) == 2
    for _ in range(3):
        await run.update_and_generate(6)


async def test_the_processes_listen_on_loopback_only(run):
    listening = [c for process in family(run) for c in process.net_connections() if c.status == "LISTEN"]
    assert listening and {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}


@only_sglang
@pytest.mark.parametrize("fault", [BYTES, LATE])
async def test_no_worker_commits_what_another_one_refuses(run, fault):
    """SGLang itself would answer with the result of the first worker, which received everything."""
    run.trainer.change()
    refused = run.trainer.prepare(run.engine)
    run.fault.write_text(fault)
    await run.coordinator.send(refused)
    sending = asyncio.create_task(asyncio.to_thread(run.trainer.sender.send, run.engine, run.trainer.packed()))
    failed = await run.coordinator.next(WeightFailed)
    await asyncio.wait({sending})
    assert failed.update == refused.update
    if fault == BYTES:
        assert "worker 1 of 2: ValueError: weights with digest" in failed.reason
        assert isinstance(sending.exception(), WeightTransferError)
    else:
        assert "worker 1 of 2: RuntimeError: the fault of this test" in failed.reason
        assert "worker 0" not in failed.reason and sending.exception() is None, "the others received everything"
        run.trainer.sender.close(run.engine)
    run.fault.unlink()
    waiting = run.request([1, 2, 3], 20)
    await run.coordinator.send(waiting)
    await run.update_and_generate(2, fresh=True)
    done = await run.coordinator.completion(waiting.request_id)
    assert done.spans == [VersionSpan(run.trainer.version, 0, 20)], "it generated with weights that were refused"
    run.check([1, 2, 3], done)


@pytest.fixture(scope="module")
async def engine(run):
    """The server without its agent, in the weight group of another sender: the agent's next update fails."""
    adapter = ADAPTERS[run.kind](Rollout(name="main", engine=run.kind, dtype="float32"), run.model_path)
    words = run.server().cmdline()
    port, key = int(words[words.index("--port") + 1]), run.server().environ()[KEYS[run.kind]]
    client = adapter.connect(port, key)
    tensors = run.trainer.tensors()
    engine = EngineUnderTest(client, adapter.in_flight, tensors, 320, LONGEST, IN_FLIGHT_TOKENS, workers=2)
    await engine.update()
    yield engine
    engine.close()
    await client.close()


@with_tensor_parallelism
@pytest.mark.parametrize("check", CHECKS if THOROUGH else [corrupted_weights_generate_no_token], ids=name_of)
async def test_the_interface(engine, check):
    await check(engine)


@with_tensor_parallelism
async def test_a_worker_that_is_killed_during_an_update_costs_the_engine_only(run, engine, monkeypatch):
    engine.close()
    await run.update(fresh=True)
    lost, old = run.request([1, 2, 3], IN_FLIGHT_TOKENS), run.engine
    await run.coordinator.send(lost)
    run.trainer.change()
    message = run.trainer.prepare(run.engine)
    group = run.trainer.sender._opened[run.engine].group
    middle, gone, plain = threading.Event(), threading.Event(), group.begin_broadcast

    def begin_broadcast(*arguments):
        if middle.is_set():
            gone.wait()
        wait = plain(*arguments)
        wait()
        middle.set()
        return wait

    monkeypatch.setattr(group, "begin_broadcast", begin_broadcast)
    processes, memory = family(run), server_shared_memory.used_by(run.server().pid)
    sending = asyncio.create_task(asyncio.to_thread(run.trainer.sender.send, run.engine, run.trainer.packed()))
    await run.coordinator.send(message)
    await asyncio.to_thread(middle.wait)
    workers(run)[1].send_signal(signal.SIGKILL)
    gone.set()
    with pytest.raises(WeightTransferError):
        await sending
    died = await run.coordinator.next(EngineCrashed)
    assert not died.starting
    if run.kind == "sglang":  # vLLM logs it later than the agent may ask
        assert "SGLang's scheduler_1 was killed by SIGKILL" in died.reason
    run.coordinator.received[:] = [m for m in run.coordinator.received if not isinstance(m, WeightFailed)]
    registration = await run.registered()
    assert registration.instance != old and (registration.version, registration.running) == (-1, [])
    assert bool(memory) == (run.kind == "vllm")  # SGLang has none on a CPU
    assert not [name for name in memory if (server_shared_memory.DIRECTORY / name).exists()]
    psutil.wait_procs(processes, 10)
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    await run.update()
    again = run.request([1, 2, 3], IN_FLIGHT_TOKENS)  # the other one may have ended before the kill
    await run.coordinator.send(again)
    done = await run.coordinator.completion(again.request_id)
    assert len(ints(done.token_ids)) == IN_FLIGHT_TOKENS
    assert [span.version for span in done.spans] == [run.trainer.version]


async def test_no_process_outlives_a_killed_agent(run):
    """Keep this test last: it kills the agent."""
    processes = family(run)
    assert len(processes) >= 3
    run.process.kill()
    run.process.wait()
    await asyncio.to_thread(psutil.wait_procs, processes, 10)
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    run.process.returncode = 0
