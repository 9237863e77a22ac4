"""A real vLLM behind the agent: one server for the whole module, a tiny random model, weights over gloo."""

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from letters import write_letters
from served_engine import (
    IN_FLIGHT_TOKENS,
    LONGEST,
    TOLERANCE,
    Trainer,
    agent_environment,
    floats,
    ints,
    running,
)

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import AckCompletions, EngineCrashed, GenerationFailed, WeightFailed
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout.adapters.vllm.adapter import VllmAdapter
from rljob.rollout.conformance import CHECKS, a_dead_server_is_gone
from rljob.rollout.engine_under_test import EngineUnderTest
from rljob.trainer.weight_sender import WeightTransferError

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
async def run(tmp_path_factory, make_coordinator, manifest):
    path = tmp_path_factory.mktemp("engine")
    text = manifest("job://model", maxModelLength=LONGEST)
    async with running(path, make_coordinator(), Trainer(path / "model"), text) as run:
        yield run


async def test_logprobs_equal_the_trainers_and_tokens_are_of_one_version(run):
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


async def test_more_prompt_tokens_than_a_step_takes_are_served(run):
    """On CPU a seeded request whose prompt is cut into chunks would kill the engine."""
    messages = [run.request([i, *range(300)], 5) for i in range(32)]
    await run.coordinator.send(*messages)
    for message in messages:
        assert (await run.coordinator.completion(message.request_id)).finish == "length"


async def test_the_same_seed_gives_the_same_tokens(run):
    first, second = run.request([1, 2, 3], 20), run.request([1, 2, 3], 20)
    second.sampling.seed = first.sampling.seed
    await run.coordinator.send(first, second)
    a, b = await run.coordinator.completion(first.request_id), await run.coordinator.completion(second.request_id)
    assert a.token_ids == b.token_ids


async def test_a_stop_token_ends_and_belongs_to_the_answer(run):
    message = run.request([1, 2, 3], 200, stop=range(160, 320))
    await run.coordinator.send(message)
    done = await run.coordinator.completion(message.request_id)
    tokens = ints(done.token_ids)
    assert done.finish == "stop"
    assert tokens[-1] >= 160 and all(token < 160 for token in tokens[:-1])


async def test_a_prompt_that_is_too_long_fails_permanently(run):
    message = run.request(list(range(1, 300)) * 4, 10)
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
    shared = list(range(300))  # whole blocks of it are in the prefix cache
    prompts = [[*shared, i] for i in range(8)]
    messages = [run.request(prompt, IN_FLIGHT_TOKENS) for prompt in prompts]
    before = run.trainer.version
    run.trainer.change()
    update = run.trainer.prepare(run.engine, in_flight=in_flight)
    last = run.request([*shared, len(prompts)], 1)
    await run.coordinator.send(*messages, last)
    await run.coordinator.completion(last.request_id)  # the engine accepts requests in order: all others have started
    await run.carry_out(update)
    for prompt, message in zip(prompts, messages, strict=True):
        done = await run.coordinator.completion(message.request_id)
        tokens = ints(done.token_ids)
        versions = [span.version for span in done.spans]
        assert [done.spans[0].start, done.spans[-1].end] == [0, len(tokens)]
        match in_flight:
            case "keep" | "keepStaleCache":
                assert (done.finish, len(tokens), versions) == ("length", IN_FLIGHT_TOKENS, [before, before + 1])
                assert done.spans[0].end == done.spans[1].start
            case "abort":
                assert (done.finish, versions) == ("abort", [before])
                assert len(tokens) < IN_FLIGHT_TOKENS
            case "wait":
                assert (done.finish, len(tokens), versions) == ("length", IN_FLIGHT_TOKENS, [before])
        if in_flight == "keep":  # tokens after the update use the new weights over the whole prefix
            expected = run.trainer.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
            cut = done.spans[1].start
            pairs = list(zip(floats(done.logprobs), expected, strict=True))
            assert max(abs(a - b) for a, b in pairs[cut:]) <= TOLERANCE
            assert max(abs(a - b) for a, b in pairs[:cut]) > 0.01
    await run.coordinator.send(AckCompletions([message.request_id for message in [*messages, last]]))
    fresh = run.request(shared, 20)
    await run.coordinator.send(fresh)
    done = await run.coordinator.completion(fresh.request_id)
    assert done.spans == [VersionSpan(run.trainer.version, 0, 20)]
    run.check(shared, done)


async def test_weights_reach_the_engine_through_shared_memory(run):
    run.trainer.use("ipc")
    for _ in range(3):  # the group, and the memory of the copy, are those of the update before
        run.trainer.change()
        await run.update()
    request = run.request([3, 1, 4], 20)
    await run.coordinator.send(request)
    run.check([3, 1, 4], await run.coordinator.completion(request.request_id))
    run.trainer.use("gloo")
    run.trainer.change()
    await run.update(fresh=True)


async def test_every_route_of_the_server_requires_its_key(run):
    import aiohttp

    port = next(c.laddr.port for c in run.server().net_connections() if c.status == "LISTEN")
    async with aiohttp.ClientSession() as session:
        for path in ("/health", "/collective_rpc", "/resume", "/rljob/update", "/inference/v1/generate"):
            for key in ({}, {"Authorization": "Bearer wrong"}):
                async with session.post(f"http://127.0.0.1:{port}{path}", json={}, headers=key) as response:
                    assert response.status == 401
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nX-Filler: " + b"a" * (1 << 20))  # the headers do not end
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 60)
    writer.transport.abort()
    words = " ".join(run.server().cmdline())
    key = run.server().environ()["VLLM_API_KEY"]
    assert key not in words


SENDER_THAT_HANGS = """
import sys, torch, pickle
from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.packed_weights import pack
from rljob.transfer.weight_group import WeightGroup
path, = sys.argv[1:]
tensors = pickle.load(open(path, 'rb'))
out = WeightSender('127.0.0.1', 30.0, 'gloo')
info = out.open('e', False)
print(info.group, info.port, flush=True)
sent = []
def begin_broadcast(*args, plain=WeightGroup.begin_broadcast):
    wait = plain(*args)
    sent.append(1)
    if len(sent) == 6:  # three of the members' proof, three buckets
        wait()
        print('in the middle', flush=True)
        sys.stdin.read()
    return wait
WeightGroup.begin_broadcast = begin_broadcast
out.send('e', pack(tensors, 20_000))
"""


@pytest.mark.parametrize("fate", ["killed", "hanging"])
async def test_a_sender_that_ends_in_the_middle_fails_the_update_and_the_next_one_works(run, tmp_path, fate):
    before, failed = run.trainer.version, None
    outputs = []

    async def keep_generating():  # so that a request is in flight at the update, however long the update takes to come
        while failed is None:
            request = run.request([4, 4, 4], IN_FLIGHT_TOKENS)
            await run.coordinator.send(request)
            outputs.append(await run.coordinator.completion(request.request_id))

    run.trainer.change()
    (tmp_path / "tensors").write_bytes(pickle.dumps(run.trainer.tensors()))
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER_THAT_HANGS, str(tmp_path / "tensors")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with sender:
        group, port = (await asyncio.to_thread(sender.stdout.readline)).split()
        message = run.trainer.prepare(run.engine, timeout=20 if fate == "killed" else 2)
        message.group, message.port, message.bucket_bytes = group, int(port), 20_000
        generating = [asyncio.create_task(keep_generating()) for _ in range(2)]
        await asyncio.sleep(0)  # now both have sent a request
        last = run.request([4, 4, 4], 1)
        await run.coordinator.send(last)
        await run.coordinator.completion(last.request_id)  # the engine accepts requests in order
        await run.coordinator.send(message)
        assert await asyncio.to_thread(sender.stdout.readline) == "in the middle\n"
        if fate == "killed":
            sender.kill()
        failed = await run.coordinator.next(WeightFailed)
        sender.kill()
    assert failed.update == message.update
    queued = run.request([1, 2, 3], 10)
    await run.coordinator.send(queued)
    with pytest.raises(TimeoutError):  # it must not generate with half of the new weights
        await run.coordinator.completion(queued.request_id, seconds=0.5)
    await run.update(fresh=True)
    await asyncio.gather(*generating)
    versions = [[span.version for span in done.spans] for done in outputs]
    assert [before, before + 1] in versions
    assert all(spans in ([before], [before, before + 1], [before + 1]) for spans in versions)
    done = await run.coordinator.completion(queued.request_id)
    run.check([1, 2, 3], done)
    assert done.spans == [VersionSpan(before + 1, 0, 10)]


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
    with pytest.raises(WeightTransferError):
        run.trainer.sender.close(run.engine)
        run.trainer.sender.send(run.engine, run.trainer.packed())
    await run.update(fresh=True)


@pytest.fixture(scope="module")
async def engine(run):
    """The shared server without its agent, in the weight group of another sender: the agent's next update fails."""
    adapter = VllmAdapter(Rollout(name="main", dtype="float32"), run.model_path)
    words = run.server().cmdline()
    port, key = int(words[words.index("--port") + 1]), run.server().environ()["VLLM_API_KEY"]
    client = adapter.connect(port, key)
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
    kept = run.request([1, 2, 3], 5)
    await run.coordinator.send(kept)
    await run.coordinator.completion(kept.request_id)
    await run.coordinator.send(lost)
    old = run.engine
    server = run.server()
    family = [server, *server.children(recursive=True)]
    await asyncio.sleep(0.2)
    (core,) = (process for process in family if process.name().startswith("VLLM::Engine"))
    await a_dead_server_is_gone(engine, lambda: core.send_signal(signal.SIGKILL))
    died = await run.coordinator.next(EngineCrashed)
    assert died.reason.endswith(": vLLM's EngineCore was killed by SIGKILL")
    assert not died.starting
    registration = await run.registered()
    assert registration.instance != old
    assert (registration.version, registration.running) == (-1, [])
    assert (await run.coordinator.completion(kept.request_id)).request_id == kept.request_id  # repeated
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    await run.update()
    await run.coordinator.send(lost)
    done = await run.coordinator.completion(lost.request_id)
    assert len(ints(done.token_ids)) == IN_FLIGHT_TOKENS


async def test_settings_that_vllm_refuses_end_the_agent_with_the_reason(run, tmp_path, manifest, make_coordinator):
    coordinator = make_coordinator()
    await coordinator.start()
    text = manifest(run.model_path, maxModelLength=4 * LONGEST)
    environment = agent_environment(tmp_path, coordinator.url, text)
    command = (sys.executable, "-m", "rljob.rollout.main")
    agent = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    _, log = await agent.communicate()
    await coordinator.stop()
    assert agent.returncode == 2
    last = log.decode().splitlines()[-1]
    assert "rollouts: pool 'main' cannot start its engine: the engine server exited with code 2: User-specified" in last
    died = await coordinator.next(EngineCrashed)
    assert died.starting and "max_model_len (4096) is greater than" in died.reason


async def test_no_server_outlives_a_killed_agent(run, tmp_path, manifest, make_coordinator):
    """Keep this test last: it kills the agent of the shared engine."""
    server = run.server()
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 2
    run.process.kill()
    run.process.wait()
    gone = threading.Thread(target=psutil.wait_procs, args=(family, 10))
    gone.start()
    await asyncio.to_thread(gone.join)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    run.process.returncode = 0
