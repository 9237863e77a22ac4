"""A real SGLang behind the agent: one server for the whole module, a tiny random model, weights over gloo.

`make sglang` makes an environment with SGLang and runs these tests; they take two minutes.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from letters import write_letters
from served_engine import IN_FLIGHT_TOKENS, LONGEST, Trainer, agent_environment, floats, ints, running

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import EngineCrashed, GenerationFailed, WeightFailed
from rljob.protocol.environment import SGLANG_PYTHON
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout import server_shared_memory
from rljob.rollout.adapters.sglang.main import KEY_VARIABLE
from rljob.rollout.adapters.sglang.sglang_adapter import SglangAdapter
from rljob.rollout.conformance import CHECKS, a_dead_server_is_gone
from rljob.rollout.engine_under_test import EngineUnderTest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(SGLANG_PYTHON not in os.environ, reason="needs the test environment of SGLang: make sglang"),
]
PROBE_TOLERANCE = 1e-5
ENDS = [*range(160, 320)]
"""Tokens that end an answer by the model's configuration, which no request asks for."""


@pytest.fixture(scope="module")
async def run(tmp_path_factory, make_coordinator, manifest):
    path = tmp_path_factory.mktemp("engine")
    trainer = Trainer(path / "model")
    config = path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": ENDS}))
    text = manifest("job://model", engine="sglang", maxModelLength=LONGEST)
    async with running(path, make_coordinator(), trainer, text) as run:
        yield run


async def test_logprobs_equal_the_trainers_and_tokens_are_of_one_version(run):
    """Tokens that end an answer by the model's configuration do not end it."""
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(100, 140))]
    for temperature in (1.0, 0.5):
        messages = [run.request(prompt, 30, temperature) for prompt in prompts]
        await run.coordinator.send(*messages)
        for prompt, message in zip(prompts, messages, strict=True):
            done = await run.coordinator.completion(message.request_id)
            assert done.finish == "length"
            assert len(ints(done.token_ids)) == 30
            assert done.spans == [VersionSpan(run.trainer.version, 0, 30)]
            run.check(prompt, done, temperature)


async def test_the_probe_agrees_with_the_trainer(run):
    run.trainer.change()
    ack = await run.update()
    assert ack.probe_error <= PROBE_TOLERANCE


async def test_a_stop_token_ends_and_belongs_to_the_answer(run):
    message = run.request([1, 2, 3], 200, stop=range(160, 320))
    await run.coordinator.send(message)
    done = await run.coordinator.completion(message.request_id)
    tokens = ints(done.token_ids)
    assert done.finish == "stop"
    assert tokens[-1] >= 160 and all(token < 160 for token in tokens[:-1])


async def test_prompts_that_no_server_can_serve_fail_permanently(run):
    """SGLang's scheduler would end at a token outside the vocabulary."""
    for prompt in (list(range(1, 300)) * 4, [1, 320]):
        message = run.request(prompt, 10)
        await run.coordinator.send(message)
        failed = await run.coordinator.next(GenerationFailed)
        assert (failed.request_id, failed.permanent) == (message.request_id, True)


async def test_abort_returns_the_generated_tokens(run):
    done = await run.aborted([1, 2, 3], 1000)
    assert done.finish == "abort"
    assert 0 < len(ints(done.token_ids)) < 1000
    run.check([1, 2, 3], done)


@pytest.mark.parametrize("in_flight", ["keep", "keepStaleCache", "abort", "wait"])
async def test_weights_change_while_requests_are_in_flight(run, in_flight):
    shared = list(range(300))  # a prefix in the cache
    prompts = [[*shared, i] for i in range(8)]
    messages = [run.request(prompt, IN_FLIGHT_TOKENS) for prompt in prompts]
    before = run.trainer.version
    run.trainer.change()
    update = run.trainer.prepare(run.engine, in_flight=in_flight)
    last = run.request([*shared, len(prompts)], 1)
    await run.coordinator.send(*messages, last)
    await run.coordinator.completion(last.request_id)
    await run.carry_out(update)
    for prompt, message in zip(prompts, messages, strict=True):
        done = await run.coordinator.completion(message.request_id)
        tokens = ints(done.token_ids)
        versions = [span.version for span in done.spans]
        assert [done.spans[0].start, done.spans[-1].end] == [0, len(tokens)]
        match in_flight:
            case "keep" | "keepStaleCache":
                assert (done.finish, len(tokens), versions) == ("length", IN_FLIGHT_TOKENS, [before, before + 1])
            case "abort":
                assert (done.finish, versions) == ("abort", [before])
                assert len(tokens) < IN_FLIGHT_TOKENS
            case "wait":
                assert (done.finish, len(tokens), versions) == ("length", IN_FLIGHT_TOKENS, [before])
        if in_flight == "keep":  # tokens after the update use the new weights over the whole prefix
            expected = run.trainer.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
            cut = done.spans[1].start
            pairs = list(zip(floats(done.logprobs), expected, strict=True))
            assert max(abs(a - b) for a, b in pairs[cut:]) <= 1e-4
            assert max(abs(a - b) for a, b in pairs[:cut]) > 0.01
    fresh = run.request(shared, 20)
    await run.coordinator.send(fresh)
    done = await run.coordinator.completion(fresh.request_id)
    assert done.spans == [VersionSpan(run.trainer.version, 0, 20)]
    run.check(shared, done)


async def test_an_engine_that_cannot_join_continues_unchanged(run):
    run.trainer.change()
    message = run.trainer.prepare(run.engine, fresh=True, timeout=1.5)
    message.group = "not the nonce"
    await run.coordinator.send(message)
    failed = await run.coordinator.next(WeightFailed)
    assert failed.update == message.update
    still = run.request([1, 2, 3], 10)
    await run.coordinator.send(still)
    done = await run.coordinator.completion(still.request_id)  # no weights were loaded
    assert done.spans == [VersionSpan(run.trainer.version - 1, 0, 10)]
    run.trainer.sender.close(run.engine)
    await run.update(fresh=True)


async def test_every_route_of_the_server_requires_its_key_and_it_listens_on_loopback(run):
    import aiohttp

    server = run.server()
    port = int(server.cmdline()[server.cmdline().index("--port") + 1])
    async with aiohttp.ClientSession() as session:
        for path in ("/ping", "/health", "/generate", "/update_weights_from_disk", "/continue_generation", "/docs"):
            for key in ({}, {"Authorization": "Bearer wrong"}):
                async with session.post(f"http://127.0.0.1:{port}{path}", json={}, headers=key) as response:
                    assert response.status == 401
    assert server.environ()[KEY_VARIABLE] not in " ".join(server.cmdline())
    family = [server, *server.children(recursive=True)]
    listening = [c.laddr for process in family for c in process.net_connections() if c.status == "LISTEN"]
    assert {address.ip for address in listening} == {"127.0.0.1"}


@pytest.fixture(scope="module")
async def engine(run):
    """The shared server without its agent, in the weight group of another sender: the agent's next update fails."""
    adapter = SglangAdapter(Rollout(name="main", engine="sglang", dtype="float32"), run.model_path)
    words = run.server().cmdline()
    client = adapter.connect(int(words[words.index("--port") + 1]), run.server().environ()[KEY_VARIABLE])
    engine = EngineUnderTest(client, adapter.in_flight, run.trainer.tensors(), 320, LONGEST, IN_FLIGHT_TOKENS)
    engine.tokenizer = write_letters(run.model_path, 320)
    await engine.update()
    yield engine
    engine.close()
    await client.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_interface(engine, check):
    await check(engine)


async def test_a_killed_server_is_back_in_service_once_it_has_weights(run, engine):
    lost = run.request([1, 2, 3], IN_FLIGHT_TOKENS)
    await run.coordinator.send(lost)
    old = run.engine
    server = run.server()
    family = [server, *server.children(recursive=True)]
    assert not server_shared_memory.used_by(server.pid)  # there is nothing to leave behind
    await asyncio.sleep(0.2)
    (scheduler,) = (process for process in family if "sglang::scheduler" in " ".join(process.cmdline()))
    await a_dead_server_is_gone(engine, lambda: scheduler.send_signal(signal.SIGKILL))
    died = await run.coordinator.next(EngineCrashed)
    assert "SGLang's scheduler" in died.reason and "was killed by SIGKILL" in died.reason
    assert not died.starting
    registration = await run.registered()
    assert registration.instance != old
    assert (registration.version, registration.running) == (-1, [])
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    await run.update()
    await run.coordinator.send(lost)
    done = await run.coordinator.completion(lost.request_id)
    assert len(ints(done.token_ids)) == IN_FLIGHT_TOKENS


async def test_settings_that_sglang_refuses_end_the_agent_with_the_reason(run, tmp_path, manifest, make_coordinator):
    coordinator = make_coordinator()
    await coordinator.start()
    text = manifest(run.model_path, engine="sglang", maxModelLength=LONGEST, args=["--foo"])
    environment = agent_environment(tmp_path, coordinator.url, text)
    command = (sys.executable, "-m", "rljob.rollout.main")
    agent = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    _, log = await agent.communicate()
    await coordinator.stop()
    assert agent.returncode == 2
    assert "unrecognized arguments: --foo" in log.decode().splitlines()[-1]


async def test_no_server_outlives_a_killed_agent(run):
    """Keep this test last: it kills the agent of the shared engine."""
    server = run.server()
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 2
    run.process.kill()
    run.process.wait()
    gone = threading.Thread(target=psutil.wait_procs, args=(family, 15))
    gone.start()
    await asyncio.to_thread(gone.join)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    run.process.returncode = 0
