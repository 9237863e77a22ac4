"""rljob's routes in vLLM's server: the stream of generation requests, a call to join a weight group, and one that
carries out an update: pause, receive and commit, resume, score the probe.

vLLM's own routes need four calls to receive, each with a call of all workers, and one request for each sequence of the
probe. Its pause waits for the outputs of requests in flight, which arrive at the agent in any case.

The server keeps what :mod:`rljob.rollout.adapters.update_steps` promises. It begins a step only if the one before
succeeded and the agent still waits for the answer, and calls that pause, receive or resume wait for each other: an
update that the agent gave up cannot resume an engine that receives the next one.

Workers never raise here (:class:`~rljob.rollout.adapters.vllm.weight_transfer.WorkerExtension`): vLLM stops reading
the answers to a call at the first exception, and would take the others for answers to its next call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from rljob.rollout.adapters.update_steps import PAUSE, RECEIVE, RESUME, SCORE
from rljob.rollout.adapters.vllm.generation_stream import GENERATE, score, serve
from rljob.rollout.adapters.worker_results import WorkerResult, agreed_digest, require_success
from rljob.rollout.auth_middleware import Application, Scope

Call: TypeAlias = Callable[[Any, bytes, Callable[[], bool]], Awaitable[object]]
"""Of a route: engine, body, and whether the agent has given up the call; returns the answer."""

JOIN = "/rljob/join"
UPDATE = "/rljob/update"


class Pause(msgspec.Struct):
    """The step PAUSE.

    Args:
        mode: of vLLM: keep, abort or wait.
        clear_cache: whether the KV cache is cleared.
    """

    mode: str
    clear_cache: bool


class Receive(msgspec.Struct):
    """The step RECEIVE.

    Args:
        update: a :class:`~rljob.rollout.adapters.vllm.weight_transfer.RoundInfo` without its ``timeout_seconds``.
        weight_version: vLLM's label of the new weights.
    """

    update: dict[str, Any]
    weight_version: str


class Steps(msgspec.Struct, omit_defaults=True):
    """Body of UPDATE: the steps to carry out, in this order; each is optional.

    Args:
        pause: stop generating.
        receive: receive, compare and commit.
        resume: continue generating.
        score: sequences whose log-probabilities to return.
        seconds: time limit of pause and receive together; None: of the pause there is none.
    """

    pause: Pause | None = None
    receive: Receive | None = None
    resume: bool = False
    score: list[list[int]] = []
    seconds: float | None = None


class StepsDone(msgspec.Struct):
    """Answer of UPDATE.

    Args:
        failed: the step that failed; empty if all succeeded.
        error: why it failed.
        digest: that all workers received; empty unless they committed.
        scores: of the sequences.
        seconds: of each step that ended.
    """

    failed: str
    error: str = ""
    digest: str = ""
    scores: list[list[float]] = []
    seconds: dict[str, float] = {}


class UpdateRoutes:
    """ASGI middleware that serves the routes.

    Args:
        app: the server.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._calls: dict[str, Call] = {JOIN: self._join, UPDATE: self._update}
        self._one = asyncio.Lock()  # join, pause, receive or resume at a time

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request or connection."""
        if scope["type"] == "websocket" and scope["path"] == GENERATE:
            await serve(scope["app"].state.engine_client, receive, send)
            return
        call = self._calls.get(scope["path"]) if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        leaving = asyncio.create_task(_wait_until_left(receive))
        try:
            status, answer = 200, await call(scope["app"].state.engine_client, body, leaving.done)
        except Exception as error:  # noqa: BLE001 of a worker, or a dead engine; the agent receives and logs it
            status, answer = 500, {"error": {"message": _describe(error)}}
        finally:
            leaving.cancel()
        content = msgspec.json.encode(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _join(self, engine: Any, body: bytes, left: Callable[[], bool]) -> None:
        async with self._one:
            require_success(await _call_workers(engine, "rljob_join", msgspec.json.decode(body)))

    async def _update(self, engine: Any, body: bytes, left: Callable[[], bool]) -> StepsDone:
        return await _Update(engine, msgspec.json.decode(body, type=Steps), left).run(self._one)


class _Update:
    """One call of UPDATE.

    Args:
        engine: vLLM's AsyncLLM.
        steps: to carry out.
        left: whether the agent has given up the call.
    """

    def __init__(self, engine: Any, steps: Steps, left: Callable[[], bool]) -> None:
        self._engine = engine
        self._steps = steps
        self._left = left
        self._deadline = None if steps.seconds is None else time.monotonic() + steps.seconds
        self._done = StepsDone("")

    async def run(self, one: asyncio.Lock) -> StepsDone:
        """Carry out the steps, those that change the engine under the lock ``one``."""
        steps = self._steps
        try:
            if steps.pause is not None or steps.receive is not None or steps.resume:
                async with one:
                    await self._change()
            if steps.score:
                await self._step(SCORE, self._score, steps.score)
        except Exception as error:  # noqa: BLE001 of a worker, or a dead engine; the agent receives and logs it
            self._done.error = _describe(error)
        return self._done

    async def _change(self) -> None:
        steps = self._steps
        if steps.pause is not None:
            await self._step(PAUSE, self._pause, steps.pause)
        if steps.receive is not None:
            await self._step(RECEIVE, self._receive, steps.receive)
        if steps.resume:
            await self._step(RESUME, self._resume, None)

    async def _step(self, name: str, call: Callable[[Any], Awaitable[None]], argument: object) -> None:
        started, self._done.failed = time.monotonic(), name
        if self._left():
            raise RuntimeError("the agent does not wait any more")
        await call(argument)
        self._done.failed, self._done.seconds[name] = "", time.monotonic() - started

    def _remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    async def _pause(self, pause: Pause) -> None:
        try:
            async with asyncio.timeout(self._remaining()):
                if pause.clear_cache:
                    await self._engine.renderer.clear_mm_cache_async()
                await self._engine.engine_core.pause_scheduler_async(mode=pause.mode, clear_cache=pause.clear_cache)
        except TimeoutError:
            raise RuntimeError(f"the engine did not pause within {self._steps.seconds} s") from None

    async def _receive(self, receive: Receive) -> None:
        """Receive and commit; the workers compare the digests before they commit."""
        update = receive.update | {"timeout_seconds": self._remaining()}
        digest = agreed_digest(await _call_workers(self._engine, "rljob_receive", update))
        await self._engine.update_weight_version(receive.weight_version)
        self._done.digest = digest

    async def _resume(self, _: None) -> None:
        await self._engine.resume_generation()

    async def _score(self, sequences: list[list[int]]) -> None:
        self._done.scores = await asyncio.gather(*(score(self._engine, sequence) for sequence in sequences))


async def _call_workers(engine: Any, method: str, argument: object) -> list[WorkerResult]:
    """Call a method of the workers of all data-parallel replicas; return their results.

    Raises:
        RuntimeError: an engine process is dead.
    """
    replies = await engine.engine_core.call_utility_all_async("collective_rpc", method, None, (argument,), None)
    return [msgspec.convert(result, WorkerResult) for replica in replies for result in replica]


async def _wait_until_left(receive: Any) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
