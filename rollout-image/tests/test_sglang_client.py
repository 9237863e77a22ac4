"""Requests of the agent to SGLang, against a fake server that answers like SGLang 0.5.23."""

import asyncio
from array import array

import msgspec
import pytest
from fake_server import serving
from letters import FIRST, write_letters

from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import ParameterMeta, Probe, VersionSpan
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError, unpack_ints
from rljob.rollout.adapters.sglang.sglang_client import NO_NUMBER, SglangClient
from rljob.rollout.adapters.sglang.sglang_orders import SglangGroup, SglangRound

VOCABULARY = 100


@pytest.fixture
async def server():
    async with serving() as fake:
        yield fake


@pytest.fixture
def letters(tmp_path):
    return write_letters(tmp_path, VOCABULARY)


@pytest.fixture
async def client(server, letters):
    client = SglangClient(server.url, "secret", VOCABULARY, lambda: letters)
    yield client
    await client.close()


def generated(tokens, finish="length", spans=((0, 1, "0.3"),), logprobs=None):
    spans = [{"version": version, "start": start, "end": end} for start, end, version in spans]
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    return {
        "output_ids": tokens,
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": finish, "length": len(tokens)},
            "weight_versions": spans,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)],
        },
    }


def prompt(*tokens):
    return array("i", tokens).tobytes()


def update(version=3):
    return PrepareWeights(
        update=1,
        lineage=2,
        version=version,
        group="nonce",
        address="10.0.0.1",
        port=77,
        world_size=2,
        transport="gloo",
        bucket_bytes=10,
        parameters=[ParameterMeta("w", "float32", [2, 3])],
        probe=Probe([], []),
        in_flight="keep",
        timeout_seconds=5.0,
    )


async def test_a_request_has_only_the_stop_tokens_of_the_task(server, client):
    server.answer = generated([5, 6], "stop", [(0, 1, "default"), (1, 2, "0.7")])
    output = await client.generate("r1", prompt(1, 2), SamplingParams(0.5, 9, [6], 3))
    ((path, body, key),) = server.calls
    assert (path, key) == ("/generate", "Bearer secret")
    assert body == {
        "rid": "r1",
        "input_ids": [1, 2],
        "sampling_params": {
            "temperature": 0.5,
            "max_new_tokens": 9,
            "stop_token_ids": [6],
            "ignore_eos": False,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
        },
        "return_logprob": True,
        "extra_key": "default",
    }
    assert (unpack_ints(output.token_ids), output.finish) == ([5, 6], "stop")
    assert array("f", output.logprobs).tolist() == [-0.5, -0.5]
    assert output.spans == [VersionSpan(-1, 0, 1), VersionSpan(7, 1, 2)]


@pytest.mark.parametrize(
    ("answered", "options", "kept", "finish"),
    [
        ([], {"stop": ["34"]}, 2, "stop"),
        ([2], {"stop": ["23"]}, 1, "stop"),
        ([], {"stop": ["9"]}, 3, "length"),
        ([], {"min_tokens": 2, "stop_token_ids": [3, 5]}, 3, "stop"),
        ([8], {"min_tokens": 2, "stop_token_ids": [3, 4]}, 2, "stop"),
    ],
)
async def test_an_answer_is_cut_after_the_token_that_ends_it(server, client, answered, options, kept, finish):
    stops = ["".join(chr(FIRST + int(digit)) for digit in stop) for stop in options.pop("stop", [])]
    sampling = msgspec.structs.replace(SamplingParams(1.0, 3, [], 3, stops, answered=len(answered)), **options)
    server.answer = generated([3, 4, 5], spans=((0, 1, "0.3"), (1, 3, "0.4")), logprobs=[-1.0, -2.0, -3.0])
    output = await client.generate("r1", prompt(7, *answered), sampling)
    assert (unpack_ints(output.token_ids), output.finish) == ([3, 4, 5][:kept], finish)
    assert array("f", output.logprobs).tolist() == [-1.0, -2.0, -3.0][:kept]
    assert output.spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, kept)][: 1 + (kept > 1)]
    assert server.calls[0][1]["sampling_params"]["stop_token_ids"] == []


async def test_without_stop_tokens_nothing_ends_an_answer(server, client):
    server.answer = generated([5])
    await client.generate("r1", prompt(1), SamplingParams(1.0, 1, [], 3))
    assert server.calls[0][1]["sampling_params"]["ignore_eos"] is True


@pytest.mark.parametrize(("stops", "finish"), [([5], "stop"), ([6], "length"), ([], "length")])
async def test_a_stop_token_that_is_the_last_one_allowed_ends_with_stop(server, client, stops, finish):
    server.answer = generated([5])
    assert (await client.generate("r1", prompt(1), SamplingParams(1.0, 1, stops, 3))).finish == finish


async def test_an_answer_without_tokens_has_no_spans(server, client):
    server.answer = generated([], "abort", [(0, 0, "0.3")])
    output = await client.generate("r1", prompt(1), SamplingParams(1.0, 1, [], 3))
    assert (output.token_ids, output.spans, output.finish) == (b"", [], "abort")


async def test_a_log_probability_that_is_no_number_has_a_value(server, client):
    server.answer = generated([5], logprobs=[None])
    output = await client.generate("r1", prompt(1), SamplingParams(1.0, 1, [], 3))
    assert array("f", output.logprobs).tolist() == [NO_NUMBER]


@pytest.mark.parametrize("spans", [[], [(0, 1, "0.1")], [(1, 2, "0.1")], [(0, 1, "0.1"), (0, 2, "0.2")]])
async def test_versions_that_do_not_cover_the_tokens_are_a_failure(server, client, spans):
    server.answer = generated([5, 6], spans=spans)
    with pytest.raises(EngineGoneError, match="SGLang answered 2 tokens with 2 log-probabilities and the versions"):
        await client.generate("r1", prompt(1), SamplingParams(1.0, 2, [], 3))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
async def test_a_token_that_would_end_the_server_is_not_sent(server, client, token):
    with pytest.raises(BadRequestError, match="a token id outside the model's vocabulary of 100"):
        await client.generate("r1", prompt(1, token), SamplingParams(1.0, 2, [], 3))
    with pytest.raises(BadRequestError):
        await client.score([1, token])
    assert server.calls == []


async def test_scores_are_those_of_the_prompt_without_its_first_token(server, client):
    server.answer = generated([5])
    server.answer["meta_info"]["input_token_logprobs"] = [[None, 1, None], [-1.5, 2, None], [-2.5, 0, None]]
    assert await client.score([1, 2, 99]) == [-1.5, -2.5]
    assert server.calls[0][1]["logprob_start_len"] == 0


async def test_joining_and_receiving_use_sglangs_routes(server, client):
    await client.join(update(), 4.0)
    path, body, _ = server.calls[0]
    assert path == "/init_weights_update_group"
    group = msgspec.json.decode(body.pop("group_name"), type=SglangGroup)
    assert group == SglangGroup("nonce", 10, 4.0)
    assert body == {
        "master_address": "10.0.0.1",
        "master_port": 77,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
    }
    server.answer = {"success": True, "message": "abc Weight version updated to 2.3."}
    assert await client.receive(update(), 2.5) == "abc"
    path, body, _ = server.calls[1]
    assert path == "/update_weights_from_distributed"
    assert msgspec.json.decode(body.pop("group_name"), type=SglangRound) == SglangRound(2.5)
    assert body == {
        "names": ["w"],
        "dtypes": ["float32"],
        "shapes": [[2, 3]],
        "flush_cache": True,
        "weight_version": "2.3",
    }
    server.answer = generated([5], spans=[(0, 1, "2.3")])
    output = await client.generate("r1", prompt(1), SamplingParams(1.0, 1, [], 3))
    assert output.spans == [VersionSpan(3, 0, 1)]
    assert server.calls[2][1]["extra_key"] == "2.3", "cached prefixes of older weights are not used"


async def test_a_refused_update_changes_no_version(server, client):
    server.status, server.answer = 400, {"success": False, "message": "ValueError: other bytes"}
    with pytest.raises(BadRequestError, match="other bytes"):
        await client.receive(update(), 2.5)
    server.status, server.answer = 200, generated([5])
    await client.generate("r1", prompt(1), SamplingParams(1.0, 1, [], 3))
    assert server.calls[1][1]["extra_key"] == "default"


@pytest.mark.parametrize(
    ("in_flight", "mode", "flush"),
    [("keep", "retract", True), ("keepStaleCache", "in_place", False), ("abort", "retract", True)],
)
async def test_each_in_flight_mode_has_its_pause_request(server, client, in_flight, mode, flush):
    await client.pause(in_flight)
    assert server.calls[0][:2] == ("/pause_generation", {"mode": mode})
    server.answer = {"success": True, "message": "abc"}
    await client.receive(update(), 2.5)
    assert server.calls[1][1]["flush_cache"] is flush


@pytest.mark.parametrize("in_flight", ["abort", "wait"])
async def test_no_request_is_in_flight_when_these_modes_pause(server, client, in_flight):
    ends = asyncio.Event()

    async def generate(body):
        await ends.wait()
        return generated([5], "abort" if in_flight == "abort" else "length")

    async def abort(body):
        assert body == {"rid": "r1"}
        ends.set()
        return {}

    server.answers = {"/generate": generate, "/abort_request": abort}
    running = asyncio.create_task(client.generate("r1", prompt(1), SamplingParams(1.0, 1, [], 3)))
    while not server.calls:
        await asyncio.sleep(0.001)
    pausing = asyncio.create_task(client.pause(in_flight))
    late = asyncio.create_task(client.generate("r2", prompt(1), SamplingParams(1.0, 1, [], 3)))
    if in_flight == "wait":
        await asyncio.sleep(0.01)
        assert not pausing.done()
        ends.set()
    await asyncio.gather(pausing, running)
    paths = [path for path, _, _ in server.calls]
    assert paths == ["/generate", *["/abort_request"] * (in_flight == "abort"), "/pause_generation"]
    await client.resume()
    await late
    assert [path for path, _, _ in server.calls][len(paths) :] == ["/continue_generation", "/generate"]


async def test_an_absent_server_is_a_failure():
    client = SglangClient("http://127.0.0.1:9", "k", None, lambda: pytest.fail("no stop string"))
    with pytest.raises(EngineGoneError, match="SGLang does not answer"):
        await client.resume()
    assert not await client.healthy()
    assert not await client.responsive()
    await client.close()
