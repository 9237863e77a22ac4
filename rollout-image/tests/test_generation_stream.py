"""The stream of generation requests: both ends over a real connection, and the client of vLLM that uses it. What vLLM's
engine does with a request is a fake here; tests with the mark ``engine`` use the real one."""

import asyncio
from array import array
from types import SimpleNamespace

import msgspec
import pytest
import uvicorn
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import Probe, VersionSpan
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError
from rljob.rollout.adapters.vllm import generation_stream
from rljob.rollout.adapters.vllm.generation_stream import StreamOutput, StreamRequest
from rljob.rollout.adapters.vllm.update_routes import UpdateRoutes
from rljob.rollout.adapters.vllm.vllm_client import VllmClient
from rljob.rollout.auth_middleware import RequireKey

SAMPLING = SamplingParams(0.7, 9, [2], 11, ["\n"], 3, 1)
ONE_TOKEN = array("i", [1]).tobytes()


def output(name, tokens=(7,), versions=(("0.3", 0, 1),), finish="length"):
    return StreamOutput(
        name, array("i", tokens).tobytes(), array("f", [-0.5] * len(tokens)).tobytes(), list(versions), finish
    )


class FakeVllm:
    """The server's routes and its engine; ``held`` requests are answered when they are aborted."""

    def __init__(self):
        self.requests, self.frames, self.cancelled, self.errors = [], [], [], {}
        self.hold = self.errored = False
        self.held = {}
        self.started = asyncio.Event()
        self.app = UpdateRoutes(None)

    async def __call__(self, scope, receive, send):
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=self))

        async def count(message):
            if message["type"] == "websocket.send":
                self.frames.append(message["bytes"])
            await send(message)

        await RequireKey(self.app, "secret")(scope, receive, count)

    async def abort(self, names):
        for name in names:
            if name in self.held and not self.held[name].done():
                self.held[name].set_result(None)

    async def generate(self, engine, request):
        assert engine is self
        self.requests.append(request)
        self.started.set()
        if request.name in self.errors:
            raise self.errors[request.name]
        if not self.hold:
            return output(request.name, [int(request.name), 2])
        self.held[request.name] = asyncio.get_running_loop().create_future()
        try:
            await self.held[request.name]
        except asyncio.CancelledError:
            self.cancelled.append(request.name)
            raise
        return output(request.name, [5], finish="abort")


@pytest.fixture
async def server(monkeypatch):
    fake = FakeVllm()
    monkeypatch.setattr(generation_stream, "_generate", fake.generate)
    process = uvicorn.Server(uvicorn.Config(fake, port=0, lifespan="off", log_config=None))
    serving = asyncio.create_task(process.serve())
    while not process.started:
        await asyncio.sleep(0)
    fake.port = process.servers[0].sockets[0].getsockname()[1]
    fake.process = process
    yield fake
    process.should_exit = process.force_exit = True
    await serving


@pytest.fixture
async def client(server):
    client = VllmClient(f"http://127.0.0.1:{server.port}", "secret")
    yield client
    await client.close()


async def test_each_of_many_requests_gets_its_own_answer_and_answers_share_frames(server, client):
    answers = await asyncio.gather(*(client.generate(str(i), ONE_TOKEN, SAMPLING) for i in range(300)))
    assert [array("i", answer.token_ids).tolist() for answer in answers] == [[i, 2] for i in range(300)]
    assert len(server.frames) < 30
    request = server.requests[0]
    assert (request.token_ids, request.cache_salt) == (ONE_TOKEN, "default")
    assert request.sampling == SAMPLING


async def test_tokens_logprobs_versions_and_finish_are_those_of_the_answer(server, client, monkeypatch):
    async def generate(engine, request):
        return output(request.name, [7, 8, 2], [("default", 0, 1), ("0.3", 1, 2), ("1.4", 2, 3)], "stop")

    monkeypatch.setattr(generation_stream, "_generate", generate)
    answer = await client.generate("5", ONE_TOKEN, SAMPLING)
    assert array("f", answer.logprobs).tolist() == [-0.5] * 3
    assert answer.spans == [VersionSpan(-1, 0, 1), VersionSpan(3, 1, 2), VersionSpan(4, 2, 3)]
    assert answer.finish == "stop"


async def test_an_aborted_request_is_answered_with_its_tokens(server, client):
    server.hold = True
    generating = asyncio.create_task(client.generate("5", ONE_TOKEN, SAMPLING))
    await server.started.wait()
    await client.abort(["5", "unknown"])
    assert (await generating).finish == "abort"


async def test_a_cancelled_call_aborts_its_request(server, client):
    server.hold = True
    generating = asyncio.create_task(client.generate("5", ONE_TOKEN, SAMPLING))
    await server.started.wait()
    generating.cancel()
    await asyncio.wait([generating])
    await server.held["5"]
    server.hold = False
    assert (await client.generate("6", ONE_TOKEN, SAMPLING)).finish == "length"


@pytest.mark.parametrize(("error", "kind"), [(ValueError("because"), True), (RuntimeError("because"), False)])
async def test_a_refusal_and_a_failure_raise_different_errors_and_end_no_other_request(
    server, client, monkeypatch, error, kind
):
    monkeypatch.setattr(generation_stream, "_is_bad_request", lambda error: isinstance(error, ValueError))
    server.errors["5"] = error
    failed, done = await asyncio.gather(
        *(client.generate(name, ONE_TOKEN, SAMPLING) for name in "56"), return_exceptions=True
    )
    assert type(failed) is (BadRequestError if kind else EngineGoneError) and "because" in str(failed)
    assert array("i", done.token_ids).tolist() == [6, 2]


async def test_the_end_of_the_connection_fails_its_requests_and_the_next_one_connects_again(server, client):
    server.hold = True
    calls = [asyncio.create_task(client.generate(name, ONE_TOKEN, SAMPLING)) for name in "56"]
    while len(server.requests) < 2:
        await asyncio.sleep(0)
    for connection in list(server.process.server_state.connections):
        connection.transport.abort()
    for failed in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failed, EngineGoneError) and "does not answer" in str(failed)
    while len(server.cancelled) < 2:  # the server ends them too
        await asyncio.sleep(0)
    server.hold = False
    assert (await client.generate("7", ONE_TOKEN, SAMPLING)).finish == "length"


async def test_an_answer_that_cannot_be_decoded_ends_the_connection(server, client, monkeypatch):
    monkeypatch.setattr(generation_stream, "_encode", lambda messages: b"\xc1")
    with pytest.raises(EngineGoneError, match="does not answer"):
        await client.generate("5", ONE_TOKEN, SAMPLING)


async def test_a_wrong_key_and_an_absent_server_are_failures(server):
    for client in (VllmClient(f"http://127.0.0.1:{server.port}", "wrong"), VllmClient("http://127.0.0.1:9", "secret")):
        with pytest.raises(EngineGoneError, match="does not answer"):
            await client.generate("5", ONE_TOKEN, SAMPLING)
        with pytest.raises(EngineGoneError, match="does not answer"):
            await client.abort(["5"])
        await client.close()
    assert server.requests == []


async def test_an_abort_of_a_dead_engine_is_a_failure(server, client):
    server.errored = True
    with pytest.raises(EngineGoneError, match="dead"):
        await client.abort(["5"])


async def test_an_abort_before_the_first_request_connects(server, client):
    await client.abort(["unknown"])
    assert (await client.generate("5", ONE_TOKEN, SAMPLING)).finish == "length"


async def test_long_prompts_are_spread_over_frames(server, client, monkeypatch):
    monkeypatch.setattr(generation_stream, "FRAME_BYTES", 10)
    prompts = [bytes(4), bytes(8), bytes(16), bytes(4)]
    await asyncio.gather(*(client.generate(str(i), prompt, SAMPLING) for i, prompt in enumerate(prompts)))
    assert [request.token_ids for request in server.requests] == prompts


UPDATE = PrepareWeights(1, 2, 9, "nonce", "h", 5, 2, "gloo", 64, [], Probe([], []), "keep", 9.0)


class Workers:
    """vLLM's engine during an update; it receives until ``go``."""

    def __init__(self):
        self.engine_core = self.renderer = self
        self.steps, self.go, self.receiving = [], asyncio.Event(), asyncio.Event()

    async def clear_mm_cache_async(self):
        pass

    async def pause_scheduler_async(self, mode, clear_cache):
        self.steps.append("pause")

    async def call_utility_all_async(self, *call):
        self.receiving.set()
        await self.go.wait()
        return [[{"digest": "d1", "error": ""}]]

    async def update_weight_version(self, version):
        self.steps.append(version)

    async def resume_generation(self):
        self.steps.append("resume")


@pytest.fixture
def workers(server):
    """The engine of ``server``."""
    workers = Workers()
    for name in ("engine_core", "renderer", "update_weight_version", "resume_generation"):
        setattr(server, name, getattr(workers, name))
    return workers


async def test_new_requests_do_not_share_cached_prefixes_with_older_weights(server, client, workers):
    workers.go.set()
    await client.generate("1", ONE_TOKEN, SAMPLING)
    assert (await client.update_in_one_call(UPDATE, 2.0)).digest == "d1"
    await client.generate("2", ONE_TOKEN, SAMPLING)
    assert workers.steps == ["pause", "2.9", "resume"]
    assert [request.cache_salt for request in server.requests] == ["default", "2.9"]


async def test_an_update_that_the_agent_gives_up_does_not_resume(server, client, workers):
    update = asyncio.create_task(client.update_in_one_call(UPDATE, 2.0))
    await workers.receiving.wait()
    update.cancel()
    await asyncio.wait({update})
    while server.process.server_state.connections:  # until the server has noticed
        await asyncio.sleep(0)
    workers.go.set()
    await client.pause("keep")  # after the steps of the update
    assert workers.steps == ["pause", "2.9", "pause"]


class StreamingVllm:
    """vLLM's engine: it generates ``chunks`` of tokens, and only one more after an abort."""

    def __init__(self, model, chunks):
        self.model_config = SimpleNamespace(model=str(model))
        self.chunks = chunks
        self.aborted = []

    async def abort(self, name):
        self.aborted.append(name)

    async def outputs(self, engine, request, prompt, streamed):
        assert streamed
        count = 0
        for i, chunk in enumerate(self.chunks):
            last = i + 1 == len(self.chunks) or bool(self.aborted)
            count += len(chunk)
            spans = [("0.1", 0, 2), ("0.2", 2, count)] if last else []
            yield SimpleNamespace(
                token_ids=chunk,
                logprobs=SimpleNamespace(logprobs=[-float(token) for token in chunk]),
                finish_reason=("abort" if self.aborted else "length") if last else None,
                weight_versions=[SimpleNamespace(version=v, start=start, end=end) for v, start, end in spans],
            )
            if last:
                return


@pytest.fixture
def letters(tmp_path):
    """A model directory whose tokens 97 to 122 are the letters a to z."""
    tokenizer = Tokenizer(WordLevel({chr(i): i for i in range(97, 123)}, unk_token="z"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("answered", "sampling", "kept", "finish", "aborts"),
    [
        ("", {"stop": ["cd"]}, "abcd", "stop", 1),
        ("", {"stop": ["ef"]}, "abcdef", "stop", 0),
        ("", {"stop": ["xy"]}, "abcdef", "length", 0),
        ("xa", {"stop": ["aab"]}, "ab", "stop", 1),
        ("", {"min_tokens": 2, "stop_token_ids": [ord("b"), ord("e")]}, "abcde", "stop", 0),
        ("xyz", {"min_tokens": 2, "stop_token_ids": [ord("a")]}, "a", "stop", 1),
    ],
)
async def test_an_answer_of_vllm_ends_at_the_token_that_ends_it(
    letters, monkeypatch, answered, sampling, kept, finish, aborts
):
    engine = StreamingVllm(letters, [[97, 98], [99], [100], [101, 102]])
    monkeypatch.setattr(generation_stream, "_outputs", engine.outputs)
    params = msgspec.structs.replace(SamplingParams(1.0, 6, [], 1, answered=len(answered)), **sampling)
    prompt = array("i", [1, 2, *map(ord, answered)]).tobytes()
    found = await generation_stream._generate(engine, StreamRequest("r", prompt, "", params))
    tokens = array("i", found.token_ids).tolist()
    assert ("".join(map(chr, tokens)), found.finish, len(engine.aborted)) == (kept, finish, aborts)
    assert array("f", found.logprobs).tolist() == [-float(token) for token in tokens]
    assert found.versions == [("0.1", 0, min(2, len(tokens))), ("0.2", 2, len(tokens))][: 1 + (len(tokens) > 2)]


async def test_an_abort_before_the_end_returns_the_tokens_so_far(letters, monkeypatch):
    engine = StreamingVllm(letters, [[97, 98], [99], [100]])
    monkeypatch.setattr(generation_stream, "_outputs", engine.outputs)
    engine.aborted.append("r")
    params = SamplingParams(1.0, 6, [], 1, ["zz"])
    found = await generation_stream._generate(engine, StreamRequest("r", ONE_TOKEN, "", params))
    assert (array("i", found.token_ids).tolist(), found.finish) == ([97, 98], "abort")
