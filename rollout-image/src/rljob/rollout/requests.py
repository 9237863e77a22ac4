"""The agent's table of generation requests.

Duty: each Generate runs once, however often the coordinator repeats it, and its Completion is repeated until the
coordinator has stored it. At most ``max_concurrency`` requests are in the engine; further requests wait here, so a slot
is filled in the iteration of the event loop in which it became free. Completions that end within ``FLUSH_SECONDS``
share a message.

A request is waiting, running (one task each) or finished. When the engine is lost, waiting and running requests are
dropped without a message: the registration of the next engine lists no running request, and the coordinator dispatches
them again. Finished requests stay.

The context and the answer of a request are kept for the next turn of its branch and for branches that are made from
it, whose requests then bring only what they add. A request whose beginning is not here is answered with PrefixMissing,
and comes again whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rljob.protocol.agent_protocol import Completion, Completions, Generate, GenerationFailed, PrefixMissing, RequestId
from rljob.protocol.contexts import KeptContexts
from rljob.rollout.adapters.base import BadRequestError, EngineClient, EngineError, GenerationOutput, engine_errors

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.002
ABORT_AGAIN_SECONDS = 0.1
KEPT_BYTES = 256 << 20  # of contexts for later turns: two thousand of 32,000 tokens
MESSAGE_BYTES = 8 << 20  # far below a frame's limit: messages share frames
SPAN_BYTES, OVERHEAD_BYTES = 32, 256  # upper bounds of the encoded size, per span and per completion

Key: TypeAlias = tuple[str, int, int, str]


@dataclass(slots=True, eq=False)
class _Request:
    message: Generate  # with all its tokens
    name: str  # in the engine; never used twice
    task: asyncio.Task[None] | None = None
    discarded: bool = False


class RequestTable:
    """Waiting, running and finished requests; see the module.

    Args:
        max_concurrency: requests in the engine at a time.
        send: sends a message to the coordinator.
        spawn: starts a task; a task that fails ends the agent.
        check_engine: called after the engine failed a request; returns whether the engine is healthy. If it is not,
            the agent calls :meth:`detach`.
    """

    def __init__(
        self,
        max_concurrency: int,
        send: Callable[[Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        check_engine: Callable[[], Awaitable[bool]],
    ) -> None:
        self._max_concurrency = max_concurrency
        self._send = send
        self._spawn = spawn
        self._check_engine = check_engine
        self._engine: EngineClient | None = None
        self._held = False
        self._requests: dict[Key, _Request] = {}  # waiting and running
        self._waiting: deque[_Request] = deque()
        self._running: set[_Request] = set()  # includes discarded requests that are generated again
        self._finished: dict[Key, Completion] = {}
        self._contexts = KeptContexts(KEPT_BYTES)
        self._unsent: list[Completion] = []
        self._flush_due = False
        self._names = 0
        self._progress = 0.0  # time.monotonic() of the last sign that the engine generates
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests held here until the engine has room."""
        return len(self._waiting)

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since the engine ended a request, while it has requests; 0 without requests or during a hold."""
        return 0.0 if self._held or not self._running else time.monotonic() - self._progress

    def note_progress(self) -> None:
        """Record that the engine generates."""
        self._progress = time.monotonic()

    @property
    def a_token(self) -> bytes:
        """A token id (int32) of a request in the engine."""
        return next(iter(self._running)).message.token_ids[:4]

    def attach(self, engine: EngineClient) -> None:
        """Serve from ``engine``."""
        self._engine = engine

    def detach(self) -> None:
        """Drop all requests that are not finished, because the engine is gone."""
        self._engine, self._held = None, False
        for request in self._running:
            if request.task is not None:
                request.task.cancel()
        self._running.clear()
        self._requests.clear()
        self._waiting.clear()
        self._contexts.clear()
        self._update_emptied()

    def hold(self) -> None:
        """Send no more requests to the engine."""
        self._held = True

    def release(self) -> None:
        """End :meth:`hold`."""
        self._held = False
        self.note_progress()
        self._fill()

    def unfinished(self) -> list[RequestId]:
        """Return the ids of waiting and running requests."""
        return [request.message.request_id for request in self._requests.values() if not request.discarded]

    def unacknowledged(self) -> list[Completions]:
        """Return the completions that are not acknowledged. The caller sends them; a pending flush does not."""
        self._unsent.clear()
        return in_messages(self._finished.values())

    def generate(self, message: Generate) -> None:
        """Accept a request, unless it is waiting or running, or its prefix is missing; repeat its completion if it is
        finished."""
        key = _key(message.request_id)
        finished = self._finished.get(key)
        if finished is not None:
            self._queue(finished)
            return
        known = self._requests.get(key)
        if known is not None and not known.discarded:
            return
        whole = self._contexts.whole(message)
        if whole is None:
            self._send(PrefixMissing(message.request_id))
            return
        self._names += 1
        request = _Request(whole, str(self._names))
        self._requests[key] = request
        self._waiting.append(request)
        self._emptied.clear()
        self._fill()

    def abort(self, request_ids: list[RequestId], discard: bool) -> None:
        """Stop requests; each ends as a Completion with finish ``abort`` unless ``discard``."""
        in_engine = []
        for request_id in request_ids:
            key = _key(request_id)
            if discard:
                self._finished.pop(key, None)
            request = self._requests.get(key)
            if request is None:
                continue
            request.discarded = request.discarded or discard
            if request.task is not None:
                in_engine.append(request)
                continue
            self._waiting.remove(request)
            self._finish(request, GenerationOutput(b"", b"", [], "abort"), 0.0)
        if in_engine:
            self._spawn(self._abort_in_engine(in_engine))
        self._update_emptied()

    def acknowledge(self, request_ids: list[RequestId]) -> None:
        """Forget completions that the coordinator has stored."""
        for request_id in request_ids:
            self._finished.pop(_key(request_id), None)
        self._update_emptied()

    def forget(self, contexts: list[str]) -> None:
        """Keep these contexts no more."""
        self._contexts.forget(contexts)

    async def wait_empty(self) -> None:
        """Return when no request is waiting or running and all completions are acknowledged."""
        await self._emptied.wait()

    def _fill(self) -> None:
        engine = self._engine
        while self._waiting and engine is not None and not self._held and len(self._running) < self._max_concurrency:
            request = self._waiting.popleft()
            if not self._running:
                self.note_progress()
            self._running.add(request)
            request.task = self._spawn(self._run(engine, request))

    async def _run(self, engine: EngineClient, request: _Request) -> None:
        message, start = request.message, time.perf_counter()
        try:
            with engine_errors():
                output = await engine.generate(request.name, message.token_ids, message.sampling)
        except EngineError as error:
            await self._fail(engine, request, error)
            return
        self._running.discard(request)
        self.note_progress()
        self._fill()
        self._finish(request, output, time.perf_counter() - start)

    async def _fail(self, engine: EngineClient, request: _Request, error: EngineError) -> None:
        permanent = isinstance(error, BadRequestError)
        if not permanent and not await self._check_engine():
            return  # detach() will drop this request
        if self._engine is not engine:
            return
        log.warning("request %s failed: %s", request.message.request_id, error)
        self._running.discard(request)
        self._forget(request)
        if not request.discarded:
            self._send(GenerationFailed(request.message.request_id, str(error), permanent))
        self._fill()
        self._update_emptied()

    def _finish(self, request: _Request, output: GenerationOutput, seconds: float) -> None:
        self._forget(request)
        if request.discarded:
            self._update_emptied()
            return
        completion = Completion(
            request.message.request_id,
            output.token_ids,
            output.logprobs,
            output.spans,
            output.finish,
            seconds,
            request.message.context,
        )
        self._contexts.keep(completion.request_id, request.message.token_ids + output.token_ids)
        self._finished[_key(completion.request_id)] = completion
        self._queue(completion)

    def _forget(self, request: _Request) -> None:
        key = _key(request.message.request_id)
        if self._requests.get(key) is request:  # else the request was discarded and generated again
            del self._requests[key]

    def _queue(self, completion: Completion) -> None:
        self._unsent.append(completion)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        for message in in_messages(self._unsent):
            self._send(message)
        self._unsent = []

    async def _abort_in_engine(self, requests: list[_Request]) -> None:
        """Repeat the abort until all requests have ended: an abort that overtakes its request has no effect."""
        engine = self._engine
        while engine is not None and engine is self._engine:
            left = [request for request in requests if request.task is not None and not request.task.done()]
            if not left:
                return
            try:
                with engine_errors():
                    await engine.abort([request.name for request in left])
            except EngineError as error:
                log.warning("requests were not aborted: %s", error)
                return  # generate() fails too and handles the error
            tasks = [request.task for request in left if request.task is not None]
            await asyncio.wait(tasks, timeout=ABORT_AGAIN_SECONDS)

    def _update_emptied(self) -> None:
        if not self._requests and not self._finished:
            self._emptied.set()
        else:
            self._emptied.clear()


def in_messages(completions: Iterable[Completion]) -> list[Completions]:
    """Return completions as messages of at most ``MESSAGE_BYTES`` each, unless a single completion is longer."""
    messages: list[Completions] = []
    room = 0
    for completion in completions:
        size = (
            len(completion.token_ids) + len(completion.logprobs) + SPAN_BYTES * len(completion.spans) + OVERHEAD_BYTES
        )
        if size > room:
            messages.append(Completions([]))
            room = MESSAGE_BYTES
        messages[-1].items.append(completion)
        room -= size
    return messages


def _key(request_id: RequestId) -> Key:
    return request_id.key
