"""rljob's routes in vLLM's server: the stream of generation requests, a call to join a weight group, one to receive
and commit weights, and a pause without vLLM's wait of 20 ms.

vLLM's own routes need four calls to receive, each with a call of all workers. Its pause waits for the outputs of
requests in flight, which arrive at the agent in any case.

Workers never raise here (:class:`~rljob.rollout.adapters.vllm.weight_transfer.WorkerExtension`): vLLM stops reading
the answers to a call at the first exception, and would take the others for answers to its next call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rljob.rollout.adapters.vllm.generation_stream import GENERATE, serve
from rljob.rollout.auth_middleware import Application, Scope

PAUSE = "/rljob/pause"
JOIN = "/rljob/join"
RECEIVE = "/rljob/receive"


class Pause(msgspec.Struct):
    """Body of PAUSE.

    Args:
        mode: of vLLM: keep, abort or wait.
        clear_cache: whether the KV cache is cleared.
    """

    mode: str
    clear_cache: bool


class Receive(msgspec.Struct):
    """Body of RECEIVE.

    Args:
        update: a :class:`~rljob.rollout.adapters.vllm.weight_transfer.RoundInfo`.
        weight_version: vLLM's label of the new weights.
    """

    update: dict[str, Any]
    weight_version: str


class Received(msgspec.Struct):
    """Answer of RECEIVE: the digest that each worker received."""

    digests: list[str]


class WorkerResult(msgspec.Struct):
    """What a worker answers: the digest of what it received, and the error that it caught, if any."""

    digest: str
    error: str


class UpdateRoutes:
    """ASGI middleware that serves the routes.

    Args:
        app: the server.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request or connection."""
        if scope["type"] == "websocket" and scope["path"] == GENERATE:
            await serve(scope["app"].state.engine_client, receive, send)
            return
        call = _CALLS.get(scope["path"]) if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            status, answer = 200, await call(scope["app"].state.engine_client, body)
        except Exception as error:  # noqa: BLE001 of a worker, or a dead engine; the agent receives and logs it
            status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        content = msgspec.json.encode(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def _pause(engine: Any, body: bytes) -> None:
    order = msgspec.json.decode(body, type=Pause)
    if order.clear_cache:
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode=order.mode, clear_cache=order.clear_cache)


async def _receive(engine: Any, body: bytes) -> Received:
    order = msgspec.json.decode(body, type=Receive)
    digests = await _call_workers(engine, "rljob_receive", order.update)
    await engine.update_weight_version(order.weight_version)
    return Received(digests)


async def _join(engine: Any, body: bytes) -> None:
    await _call_workers(engine, "rljob_join", msgspec.json.decode(body))


async def _call_workers(engine: Any, method: str, argument: object) -> list[str]:
    """Call a method of the workers of all data-parallel replicas; return their digests.

    Raises:
        RuntimeError: a worker failed, or an engine process is dead.
    """
    replies = await engine.engine_core.call_utility_all_async("collective_rpc", method, None, (argument,), None)
    results = [msgspec.convert(result, WorkerResult) for replica in replies for result in replica]
    if failed := [i for i, result in enumerate(results) if result.error]:
        errors = (f"worker {i} of {len(results)}: {results[i].error}" for i in failed)
        raise RuntimeError("; ".join(errors) if len(results) > 1 else results[0].error)
    return [result.digest for result in results]


_CALLS: dict[str, Callable[[Any, bytes], Awaitable[object]]] = {PAUSE: _pause, JOIN: _join, RECEIVE: _receive}
