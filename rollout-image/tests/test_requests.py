"""The agent's table of requests, with a fake engine."""

import asyncio

import pytest

from rljob.protocol.agent_protocol import (
    Completion,
    Completions,
    Generate,
    GenerationFailed,
    PrefixMissing,
    RequestId,
    SamplingParams,
)
from rljob.protocol.contexts import KeptContexts, context_digest
from rljob.protocol.frames import encode
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout import requests
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError, GenerationOutput
from rljob.rollout.requests import RequestTable, in_messages

TOKENS, LOGPROBS = b"\1\0\0\0", b"\0\0\0\0"


class FakeEngine:
    """Requests end when ``end`` is called."""

    def __init__(self):
        self.requests = {}  # token ids → future
        self.aborted = []
        self.ignored_aborts = 0

    async def generate(self, request, token_ids, sampling):
        self.requests[token_ids] = (request, asyncio.get_running_loop().create_future())
        return await self.requests[token_ids][1]

    async def abort(self, names):
        self.aborted.append(sorted(names))
        if self.ignored_aborts:
            self.ignored_aborts -= 1
            return
        for request, future in self.requests.values():
            if request in names and not future.done():
                future.set_result(GenerationOutput(TOKENS, LOGPROBS, [VersionSpan(3, 0, 1)], "abort"))

    def end(self, prompt, result=None):
        future = self.requests.pop(prompt)[1]
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result or GenerationOutput(TOKENS, LOGPROBS, [VersionSpan(3, 0, 1)], "length"))


class Bench:
    def __init__(self, max_concurrency=2):
        self.sent, self.tasks, self.alive = [], set(), True
        self.engine = FakeEngine()
        self.table = RequestTable(max_concurrency, self.sent.append, self.spawn, self.check)
        self.table.attach(self.engine)

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def check(self):
        return self.alive

    def request(self, name, attempt=0):
        self.table.generate(Generate(request_id(name, attempt), name.encode(), SamplingParams(1.0, 5, [], 1)))

    async def settle(self):
        for _ in range(10):  # tasks that have ended are handled
            await asyncio.sleep(0)
        while self.table._flush_due:
            await asyncio.sleep(requests.FLUSH_SECONDS)

    def completions(self):
        return [(item.request_id, item.finish) for m in self.sent if isinstance(m, Completions) for item in m.items]


def second_turn(prefix, added, context=None):
    """Return the request of turn 1 of sample a, which adds ``added`` to the tokens ``prefix``."""
    digest = context_digest(prefix + added if context is None else context)
    return Generate(RequestId("a", 1, 0), added, SamplingParams(1.0, 5, [], 1), len(prefix) // 4, digest)


def request_id(name, attempt=0):
    return RequestId(name, 0, attempt)


@pytest.fixture
def bench():
    return Bench()


async def test_no_more_than_max_concurrency_run_and_a_free_slot_is_filled_at_once(bench):
    for name in "abc":
        bench.request(name)
    await asyncio.sleep(0)
    assert set(bench.engine.requests) == {b"a", b"b"}
    assert (bench.table.running, bench.table.waiting) == (2, 1)
    bench.engine.end(b"a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert set(bench.engine.requests) == {b"b", b"c"}


async def test_completions_that_end_together_share_a_message(bench):
    bench.request("a")
    bench.request("b")
    await asyncio.sleep(0)
    bench.engine.end(b"a")
    bench.engine.end(b"b")
    await bench.settle()
    assert len(bench.sent) == 1
    (first, _) = bench.sent[0].items
    assert (first.token_ids, first.logprobs, first.spans) == (TOKENS, LOGPROBS, [VersionSpan(3, 0, 1)])


async def test_a_repeated_request_runs_once_and_its_completion_is_repeated_until_acknowledged(bench):
    bench.request("a")
    bench.request("a")
    await asyncio.sleep(0)
    assert (bench.table.running, bench.table.waiting) == (1, 0)
    bench.engine.end(b"a")
    await bench.settle()
    bench.request("a")
    await bench.settle()
    assert bench.completions() == [(request_id("a"), "length")] * 2
    assert [item.request_id for m in bench.table.unacknowledged() for item in m.items] == [request_id("a")]
    bench.table.acknowledge([request_id("a")])
    assert bench.table.unacknowledged() == []
    assert bench.engine.requests == {}


async def test_another_attempt_is_another_request(bench):
    bench.request("a")
    bench.request("a", attempt=1)
    await asyncio.sleep(0)
    assert bench.table.unfinished() == [request_id("a"), request_id("a", 1)]


async def test_an_aborted_request_ends_with_its_tokens_so_far(bench):
    for name in "abc":
        bench.request(name)
    await asyncio.sleep(0)
    bench.table.abort([request_id("a"), request_id("c"), request_id("unknown")], discard=False)
    await bench.settle()
    assert sorted(bench.completions(), key=str) == [(request_id("a"), "abort"), (request_id("c"), "abort")]
    waiting = next(item for m in bench.sent for item in m.items if item.request_id == request_id("c"))
    assert (waiting.token_ids, waiting.spans) == (b"", [])
    assert bench.table.unfinished() == [request_id("b")]


async def test_a_discarded_request_sends_no_message(bench):
    for name in "abcd":
        bench.request(name)
    await asyncio.sleep(0)
    bench.engine.end(b"b")
    await bench.settle()
    bench.sent.clear()
    bench.table.abort([request_id("a"), request_id("b"), request_id("d")], discard=True)
    assert bench.table.unfinished() == [request_id("c")]
    await bench.settle()
    assert bench.sent == []
    assert bench.table.unacknowledged() == []


async def test_a_discarded_request_that_is_repeated_runs_again(bench):
    bench.request("a")
    await asyncio.sleep(0)
    bench.engine.ignored_aborts = 1
    bench.table.abort([request_id("a")], discard=True)
    old = bench.engine.requests[b"a"]
    bench.request("a")
    await asyncio.sleep(0)
    assert bench.engine.requests[b"a"] is not old
    old[1].set_result(GenerationOutput(b"old!", LOGPROBS, [], "abort"))
    bench.engine.end(b"a")
    await bench.settle()
    assert bench.completions() == [(request_id("a"), "length")]
    assert bench.table.running == 0


async def test_an_abort_that_overtakes_its_request_is_repeated(bench, monkeypatch):
    monkeypatch.setattr(requests, "ABORT_AGAIN_SECONDS", 0.001)
    bench.engine.ignored_aborts = 2
    bench.request("a")
    await asyncio.sleep(0)
    bench.table.abort([request_id("a")], discard=False)
    while not bench.completions():
        await asyncio.sleep(0)
    assert len(bench.engine.aborted) == 3


async def test_a_bad_request_fails_permanently_and_frees_its_slot(bench):
    for name in "abc":
        bench.request(name)
    await asyncio.sleep(0)
    bench.engine.end(b"a", BadRequestError("too long"))
    await bench.settle()
    assert bench.sent == [GenerationFailed(request_id("a"), "too long", True)]
    assert set(bench.engine.requests) == {b"b", b"c"}


async def test_a_request_that_a_living_engine_failed_is_given_back(bench):
    bench.request("a")
    await asyncio.sleep(0)
    bench.engine.end(b"a", EngineGoneError("hiccup"))
    await bench.settle()
    assert bench.sent == [GenerationFailed(request_id("a"), "hiccup", False)]


async def test_any_exception_of_an_engine_s_client_gives_the_request_back(bench, monkeypatch):
    monkeypatch.setattr(requests, "ABORT_AGAIN_SECONDS", 0.001)
    bench.request("a")
    await asyncio.sleep(0)

    async def abort(names):
        raise RuntimeError("no abort")

    bench.engine.abort = abort
    bench.table.abort([request_id("a")], discard=False)
    await bench.settle()
    bench.engine.end(b"a", KeyError("tokens"))
    await bench.settle()
    assert bench.sent == [GenerationFailed(request_id("a"), "the engine's client raised KeyError: 'tokens'", False)]
    assert [task.exception() for task in bench.tasks] == [None, None]


async def test_requests_of_a_dead_engine_are_dropped_silently_and_completions_are_kept(bench):
    for name in "abcd":
        bench.request(name)
    await asyncio.sleep(0)
    bench.engine.end(b"a")
    await bench.settle()
    bench.sent.clear()
    bench.alive = False
    bench.engine.end(b"b", EngineGoneError("dead"))
    await bench.settle()
    bench.table.detach()
    await bench.settle()
    assert bench.sent == []
    assert bench.table.unfinished() == []
    assert [item.request_id for m in bench.table.unacknowledged() for item in m.items] == [request_id("a")]
    again = FakeEngine()
    bench.table.attach(again)
    bench.request("b")
    await asyncio.sleep(0)
    assert set(again.requests) == {b"b"}


async def test_nothing_enters_a_held_engine(bench):
    bench.table.hold()
    bench.request("a")
    await asyncio.sleep(0)
    assert (bench.engine.requests, bench.table.waiting) == ({}, 1)
    bench.table.release()
    await asyncio.sleep(0)
    assert set(bench.engine.requests) == {b"a"}


async def test_the_table_is_empty_once_everything_is_acknowledged(bench):
    bench.request("a")
    empty = asyncio.create_task(bench.table.wait_empty())
    await asyncio.sleep(0)
    bench.engine.end(b"a")
    await bench.settle()
    assert not empty.done()
    bench.table.acknowledge([request_id("a")])
    await empty


def completion(name, tokens):
    return Completion(
        request_id(name), b"\0" * 4 * tokens, b"\0" * 4 * tokens, [VersionSpan(0, 0, tokens)] * 9, "stop", 1.0, "0" * 32
    )


def test_completions_are_split_into_messages_far_below_a_frames_limit():
    longest = requests.MESSAGE_BYTES // 8
    sizes = [10, longest // 2, longest // 2, longest, 3 * longest, 0, 1, *[1000] * 500]
    completions = [completion(str(i), tokens) for i, tokens in enumerate(sizes)]
    messages = in_messages(completions)
    assert [item for message in messages for item in message.items] == completions
    for message in messages:
        assert len(message.items) == 1 or len(encode(message)) <= requests.MESSAGE_BYTES
    assert len(messages) < 10
    assert in_messages([]) == []


# --- requests of later turns ---


async def finish_first_turn(bench):
    """Let turn 0 of sample a end; return its context and answer."""
    bench.table.generate(Generate(request_id("a"), b"abcd", SamplingParams(1.0, 5, [], 1)))
    await asyncio.sleep(0)
    bench.engine.end(b"abcd")
    await bench.settle()
    return b"abcd" + TOKENS


async def test_a_later_turn_brings_only_what_it_adds(bench):
    first = await finish_first_turn(bench)
    bench.table.generate(second_turn(first, b"efgh"))
    await asyncio.sleep(0)
    assert set(bench.engine.requests) == {first + b"efgh"}
    bench.engine.end(first + b"efgh")
    await bench.settle()
    assert bench.sent[-1].items[0].context == context_digest(first + b"efgh")


async def test_an_interrupted_turn_continues_from_its_tokens_without_any_that_are_sent(bench):
    bench.table.generate(Generate(request_id("a"), b"abcd", SamplingParams(1.0, 5, [], 1)))
    await asyncio.sleep(0)
    bench.table.abort([request_id("a")], discard=False)
    await bench.settle()
    bench.engine.requests.clear()
    bench.table.generate(second_turn(b"abcd" + TOKENS, b""))
    await asyncio.sleep(0)
    assert set(bench.engine.requests) == {b"abcd" + TOKENS}


@pytest.mark.parametrize("lost", ["never here", "forgotten", "other tokens", "another engine", "no room"])
async def test_a_request_without_its_prefix_waits_for_the_whole_and_nothing_is_generated_before(bench, lost):
    first = b"abcd" + TOKENS
    if lost == "no room":
        bench.table._contexts = KeptContexts(4)
    if lost != "never here":
        assert await finish_first_turn(bench) == first
    if lost == "forgotten":
        bench.table.forget(["a"])
    if lost == "another engine":
        bench.table.detach()
        bench.table.attach(bench.engine)
    bench.sent.clear()
    message = second_turn(first, b"efgh", first + b"efgX" if lost == "other tokens" else None)
    bench.table.generate(message)
    await bench.settle()
    assert bench.sent == [PrefixMissing(message.request_id)] and not bench.engine.requests
    assert bench.table.unfinished() == []
    bench.table.generate(Generate(message.request_id, first + b"efgh", message.sampling))
    await asyncio.sleep(0)
    assert set(bench.engine.requests) == {first + b"efgh"}


async def test_a_repeated_request_of_a_later_turn_is_neither_run_again_nor_missing_its_prefix(bench):
    message = second_turn(await finish_first_turn(bench), b"efgh")
    bench.table.generate(message)
    await asyncio.sleep(0)
    bench.sent.clear()
    bench.table.generate(message)
    bench.engine.end(b"abcd" + TOKENS + b"efgh")
    await bench.settle()
    bench.table.generate(message)
    await bench.settle()
    assert bench.completions() == [(message.request_id, "length")] * 2 and len(bench.sent) == 2
