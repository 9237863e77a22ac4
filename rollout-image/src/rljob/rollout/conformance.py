"""Checks that an engine keeps the guarantees of :mod:`rljob.rollout.adapters.base`, for tests of an adapter.

Each check is a coroutine function that takes a running engine and raises AssertionError. It leaves the engine
generating with the weights that were sent last. With pytest:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_the_engine(engine, check):
        await check(engine)

Call :func:`a_dead_server_is_gone` last: it ends the server.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable

from rljob.rollout.adapters.base import BadRequestError, EngineError, EngineGoneError, GenerationOutput, unpack_ints
from rljob.rollout.engine_under_test import BUCKET_BYTES, HOST, PROMPT, EngineUnderTest
from rljob.transfer.packed_weights import pack
from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.rounds import send_round

SHORT_SECONDS = 1.5
GRACE_SECONDS = 5.0
"""Additional time in which a call with a time limit must return."""
WAITS = (0.1, 0.2, 0.4, 0.8, 0.05, 0.02, 0.0)  # seconds until requests are in flight: engines do not report it


Check = Callable[[EngineUnderTest], Awaitable[None]]


async def an_update_brings_a_version(engine: EngineUnderTest) -> None:
    """Later tokens have the version of the update, and the weights change what the engine computes."""
    await engine.update()
    before = await engine.client.score([*PROMPT, *PROMPT])
    await engine.update()
    after = await engine.client.score([*PROMPT, *PROMPT])
    assert len(before) == len(after) == 2 * len(PROMPT) - 1
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > engine.tolerance, "the weights are in use"
    output = await engine.generate(8)
    assert output.finish == "length"
    assert [(span.version, span.start, span.end) for span in output.spans] == [(engine.version, 0, 8)]


async def log_probabilities_are_those_of_the_present_weights(engine: EngineUnderTest) -> None:
    """generate() and score() agree on every token, for several requests at a time."""
    prompts = [[*PROMPT, i] for i in range(8)]
    outputs = await asyncio.gather(*(engine.generate(16, prompt) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        scores = await engine.client.score([*prompt, *unpack_ints(output.token_ids)])
        pairs = zip(array("f", output.logprobs), scores[len(prompt) - 1 :], strict=True)
        assert max(abs(sampled - scored) for sampled, scored in pairs) <= engine.tolerance


async def a_stop_token_ends_the_completion(engine: EngineUnderTest) -> None:
    """The stop token is the last token of the completion."""
    stops = range(engine.vocabulary // 2, engine.vocabulary)
    output = await engine.generate(200, stop=stops)
    tokens = unpack_ints(output.token_ids)
    assert (output.finish, [token in stops for token in tokens]) == ("stop", [False] * (len(tokens) - 1) + [True])


async def nothing_ends_an_answer_within_its_minimum_length(engine: EngineUnderTest) -> None:
    """Tokens that another request generated count. Log-probabilities are those of all tokens, stop tokens included."""
    stops = range(engine.vocabulary // 2, engine.vocabulary)
    for answered, least in ((0, 20), (3, 20), (3, 2)):
        output = await engine.generate(200, stop=stops, min_tokens=least, answered=answered)
        tokens = unpack_ints(output.token_ids)
        first = next(i for i, token in enumerate(tokens, 1) if token in stops and i + answered > least)
        assert (output.finish, len(tokens)) == ("stop", first)
        scores = await engine.client.score([*PROMPT, *tokens])
        pairs = zip(array("f", output.logprobs), scores[len(PROMPT) - 1 :], strict=True)
        assert max(abs(sampled - scored) for sampled, scored in pairs) <= engine.tolerance


async def a_stop_string_ends_an_answer_across_an_abort(engine: EngineUnderTest) -> None:
    """The completion ends with the first token whose text completes a stop string, wherever it was interrupted."""
    if engine.tokenizer is None:
        return
    whole = unpack_ints((await engine.generate(16, temperature=0.0)).token_ids)
    texts = [engine.tokenizer.decode(whole[:count]) for count in range(len(whole) + 1)]
    stop = texts[10][len(texts[8]) :]  # of two tokens
    count = next(count for count, text in enumerate(texts) if stop in text)
    for seam in range(count):
        prompt = [*PROMPT, *whole[:seam]]
        output = await engine.generate(16 - seam, prompt, temperature=0.0, stop_strings=[stop], answered=seam)
        assert (output.finish, unpack_ints(output.token_ids)) == ("stop", whole[seam:count])


async def temperature_0_is_greedy(engine: EngineUnderTest) -> None:
    """Tokens do not depend on the seed. Their log-probabilities are those of temperature 1."""
    first, second = [await engine.generate(16, temperature=0.0) for _ in range(2)]
    assert first.token_ids == second.token_ids
    scores = await engine.client.score([*PROMPT, *unpack_ints(first.token_ids)])
    pairs = zip(array("f", first.logprobs), scores[len(PROMPT) - 1 :], strict=True)
    assert max(abs(sampled - scored) for sampled, scored in pairs) <= engine.tolerance


async def a_request_that_is_too_long_is_a_bad_request(engine: EngineUnderTest) -> None:
    """It raises BadRequestError, and the engine serves other requests."""
    try:
        await engine.generate(8, [1] * (engine.max_model_length + 1))
    except BadRequestError:
        await engine.generate(8)
    else:
        raise AssertionError("the request was served")


async def an_abort_returns_the_tokens_that_are_there(engine: EngineUnderTest) -> None:
    """The prefix can be continued; abort() of ended and unknown requests has no effect."""
    for least in (0, 1):  # with a minimum length an engine may generate in another way
        await _abort_in_flight(engine, least)


async def _abort_in_flight(engine: EngineUnderTest, least: int) -> None:
    for wait in WAITS:
        name = engine.new_name()
        running = asyncio.create_task(engine.generate(engine.long_tokens, name=name, min_tokens=least))
        await asyncio.sleep(wait)
        while not running.done():  # an abort may overtake its request
            await engine.client.abort([name, "unknown"])
            await asyncio.wait({running}, timeout=0.1)
        tokens = unpack_ints(running.result().token_ids)
        await engine.client.abort([name])
        if running.result().finish == "abort" and 0 < len(tokens) < engine.long_tokens:
            rest = await engine.generate(4, [*PROMPT, *tokens])
            assert rest.finish == "length"
            return
    raise AssertionError("no request was aborted while it ran")


async def a_cancelled_call_leaves_the_client_usable(engine: EngineUnderTest) -> None:
    """A request whose caller is gone does not affect other requests."""
    name = engine.new_name()
    running = asyncio.create_task(engine.generate(engine.long_tokens, name=name))
    await asyncio.sleep(WAITS[0])
    running.cancel()
    await asyncio.wait({running})
    await engine.client.abort([name])
    await engine.generate(8)


async def a_paused_engine_is_healthy_and_generates_nothing(engine: EngineUnderTest) -> None:
    """pause() and resume() are idempotent; a request sent during a pause waits for its end."""
    mode = engine.mode
    await engine.client.resume()
    await engine.client.pause(mode)
    await engine.client.pause(mode)
    assert await engine.client.healthy()
    assert await engine.client.responsive()
    waiting = asyncio.create_task(engine.generate(8))
    assert not (await asyncio.wait({waiting}, timeout=0.3))[0], "it generated during a pause"
    await engine.client.resume()
    await engine.client.resume()
    assert (await waiting).finish == "length"


async def requests_in_flight_are_treated_as_the_update_says(engine: EngineUnderTest) -> None:
    """One update with requests in flight for each mode of the adapter."""
    for mode in sorted(engine.in_flight):
        for wait in WAITS:
            if await _update_in_flight(engine, mode, wait):
                break
        else:
            raise AssertionError(f"no request was in flight at an update in mode {mode}")


async def _update_in_flight(engine: EngineUnderTest, mode: str, wait: float) -> bool:
    """Return whether all requests were in flight at the update."""
    running = [asyncio.create_task(engine.generate(engine.long_tokens, min_tokens=i % 2)) for i in range(4)]
    await asyncio.sleep(wait)
    old = engine.version
    await engine.update(mode)
    met = True
    for output in await asyncio.gather(*running):
        versions, count = [span.version for span in output.spans], len(output.token_ids) // 4
        match mode:
            case "abort":
                assert old + 1 not in versions or output.finish == "length"
                met = met and (output.finish, versions) == ("abort", [old]) and count < engine.long_tokens
            case "wait":
                assert output.finish == "length"
                assert len(versions) == 1
                met = met and versions == [old]
            case _:
                assert (output.finish, count) == ("length", engine.long_tokens)
                assert set(versions) <= {old, old + 1}
                met = met and versions == [old, old + 1]
    return met


async def a_join_without_sender_fails_in_time(engine: EngineUnderTest) -> None:
    """The engine continues with its current weights."""
    listener = RendezvousListener(HOST, 1 + engine.workers)
    start = time.monotonic()
    try:
        await engine.client.join(engine.prepare(listener.rendezvous), SHORT_SECONDS)
    except EngineError:
        assert time.monotonic() - start < SHORT_SECONDS + GRACE_SECONDS
    else:
        raise AssertionError("it joined a group without sender")
    finally:
        listener.close()
    output = await engine.generate(8)
    assert [span.version for span in output.spans] == [engine.version]
    await engine.update(fresh=True)


async def a_sender_that_ends_fails_the_update_and_the_next_one_succeeds(engine: EngineUnderTest) -> None:
    """The sender leaves after sending a part of the weights; the engine stays paused and accepts another update."""
    rendezvous, sender = await engine.join(fresh=True)
    await engine.client.pause(engine.mode)
    start = time.monotonic()
    receiving = asyncio.create_task(engine.client.receive(engine.prepare(rendezvous), SHORT_SECONDS))
    try:
        await asyncio.to_thread(send_round, sender, pack(engine.tensors[:1], BUCKET_BYTES), time.monotonic() + 0.5)
    except RuntimeError:  # no receipt: the engine waits for the other tensors
        engine.close()
    await asyncio.wait({receiving})
    assert isinstance(receiving.exception(), EngineError)
    assert time.monotonic() - start < SHORT_SECONDS + GRACE_SECONDS
    assert await engine.client.responsive()
    await engine.update(fresh=True)
    output = await engine.generate(8)
    assert [span.version for span in output.spans] == [engine.version]


async def corrupted_weights_generate_no_token(engine: EngineUnderTest) -> None:
    """The engine compares the received bytes with the sender's digest before it uses them. If they differ, receive()
    raises, and the engine stays paused. Requests in flight end under the weights of the next update, which are those
    from before the corrupted one: every token must have the log-probability that these weights give."""
    for corrupted, wait in zip((len(engine.tensors) - 1, *range(len(WAITS) - 1)), WAITS, strict=True):
        await engine.update(fresh=True)
        old = engine.version
        outputs: list[GenerationOutput] = []
        stop = asyncio.Event()

        async def keep_generating(outputs: list[GenerationOutput] = outputs, stop: asyncio.Event = stop) -> None:
            while not stop.is_set():
                outputs.append(await engine.generate(engine.long_tokens))

        running = [asyncio.create_task(keep_generating()) for _ in range(4)]
        await asyncio.sleep(wait)
        await engine.fail_update(corrupted % len(engine.tensors))
        stop.set()
        late = asyncio.create_task(engine.generate(8))
        await asyncio.wait({late}, timeout=0.3)
        assert not late.done(), "it generated with corrupted weights"
        await engine.update(fresh=True, change=False)
        outputs.append(await late)
        await asyncio.gather(*running)
        for output in outputs:
            assert old + 1 not in [span.version for span in output.spans], "tokens of corrupted weights"
            scores = await engine.client.score([*PROMPT, *unpack_ints(output.token_ids)])
            pairs = zip(array("f", output.logprobs), scores[len(PROMPT) - 1 :], strict=True)
            assert max((abs(a - b) for a, b in pairs), default=0.0) <= engine.tolerance, "tokens of corrupted weights"
        met = any(len(output.spans) > 1 or output.finish == "abort" for output in outputs)
        if met or engine.mode == "wait":  # in which no request is in flight at an update
            return
    raise AssertionError("no request was in flight at the corrupted update")


CHECKS: tuple[Check, ...] = (
    an_update_brings_a_version,
    log_probabilities_are_those_of_the_present_weights,
    a_stop_token_ends_the_completion,
    nothing_ends_an_answer_within_its_minimum_length,
    a_stop_string_ends_an_answer_across_an_abort,
    temperature_0_is_greedy,
    a_request_that_is_too_long_is_a_bad_request,
    an_abort_returns_the_tokens_that_are_there,
    a_cancelled_call_leaves_the_client_usable,
    a_paused_engine_is_healthy_and_generates_nothing,
    requests_in_flight_are_treated_as_the_update_says,
    a_join_without_sender_fails_in_time,
    a_sender_that_ends_fails_the_update_and_the_next_one_succeeds,
    corrupted_weights_generate_no_token,
)


async def a_dead_server_is_gone(engine: EngineUnderTest, kill: Callable[[], object]) -> None:
    """After ``kill`` all calls raise EngineGoneError, including calls in progress."""
    running = asyncio.create_task(engine.generate(engine.long_tokens))
    await asyncio.sleep(WAITS[0])
    kill()
    await asyncio.wait({running})
    assert isinstance(running.exception(), EngineGoneError)
    assert not await engine.client.healthy()
    assert not await engine.client.responsive()
    client, mode = engine.client, engine.mode
    for call in (client.resume(), client.pause(mode), client.score(PROMPT), client.abort(["unknown"])):
        try:
            await call
        except EngineGoneError:
            continue
        raise AssertionError("a dead server answered")
