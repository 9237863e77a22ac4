"""A proxy between the components of a run. It injects a fault exactly before or after a given message.

Components connect to the coordinator, and the runner to its rewards, through the proxy. Frames of the WebSockets are
decoded with the protocol's decoders and relayed message by message; pings and pongs are relayed at once. Plain HTTP is
forwarded, and counts as a message too: ``Pull`` is the trainer's pull of a shard, ``Score`` the runner's request to a
reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web

from rljob.protocol.agent_protocol import FromAgent, ToAgent
from rljob.protocol.frames import MAX_FRAME_BYTES, encode_frame, frame_decoder
from rljob.protocol.runner_protocol import FromRunner, ToRunner
from rljob.protocol.trainer_protocol import FromTrainer, ToTrainer

log = logging.getLogger(__name__)

UP = {"agent": FromAgent, "runner": FromRunner, "trainer": FromTrainer}
DOWN = {"agent": ToAgent, "runner": ToRunner, "trainer": ToTrainer}
SLOW_SECONDS = 10.0
"""Delay of a request to a reward; shorter than the runner's time-outs."""
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}


@dataclass(frozen=True)
class Moment:
    """A point in time: ``when`` (before | after) a ``message`` from or to ``component`` passes."""

    component: str
    message: str
    when: str


@dataclass
class Trigger:
    """Calls ``inject`` once, at its moment."""

    moment: Moment
    inject: Callable[[], None]
    injected: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class ProxiedConnection:
    """The transports of a component's connection through the proxy."""

    component: str
    transports: list[asyncio.Transport]

    def cut(self) -> None:
        """Abort the connection without a closing handshake."""
        for transport in self.transports:
            transport.abort()


class Proxy:
    """One run's proxy.

    Args:
        coordinator: the coordinator's own address.
        rewards: name of each reward → its own address.
        on_message: called with each message that passes and the component that sends or receives it.
    """

    def __init__(self, coordinator: str, rewards: dict[str, str], on_message: Callable[[str, Any], None]) -> None:
        self.trigger: Trigger | None = None
        self.full_speed = asyncio.Event()  # while cleared, each request to a reward is delayed
        self.full_speed.set()
        self.coordinator = coordinator
        self.rewards = rewards
        self._on_message = on_message
        self._connections: set[ProxiedConnection] = set()
        self._up = {component: frame_decoder(union) for component, union in UP.items()}
        self._down = {component: frame_decoder(union) for component, union in DOWN.items()}

    async def __aenter__(self) -> Proxy:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        )
        app = web.Application(client_max_size=MAX_FRAME_BYTES)
        app.router.add_get("/v1/connect/{component}", self._connect)
        app.router.add_post("/rewards/{reward}/{path:.*}", self._score)
        app.router.add_route("*", "/{path:.*}", self._forward_to_coordinator)
        self._app = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._app.setup()
        site = web.TCPSite(self._app, "127.0.0.1", 0)
        await site.start()
        host, self.port = self._app.addresses[0][:2]
        self.url = f"http://{host}:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._connections):
            connection.cut()
        await self._app.cleanup()
        await self._session.close()

    @property
    def reward_urls(self) -> dict[str, str]:
        """Address of every reward through the proxy."""
        return {name: f"{self.url}/rewards/{name}" for name in self.rewards}

    def cut(self, component: str) -> None:
        """Break all connections of ``component``."""
        for connection in [
            connection for connection in self._connections if component in (connection.component, "coordinator")
        ]:
            if not (component == "coordinator" and connection.component == "reward"):
                connection.cut()

    # --- passing messages ---

    def _inject_if_due(self, component: str, message: str, when: str) -> None:
        trigger = self.trigger
        if trigger is not None and trigger.moment == Moment(component, message, when):
            self.trigger = None
            trigger.inject()
            trigger.injected.set()

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        component = request.match_info["component"]
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        try:
            upper = await self._session.ws_connect(
                f"{self.coordinator}/v1/connect/{component}",
                headers=headers,
                max_msg_size=MAX_FRAME_BYTES,
                autoping=False,
                autoclose=False,
            )
        except aiohttp.WSServerHandshakeError as error:
            raise web.HTTPForbidden if error.status == 403 else web.HTTPBadGateway from None
        except (aiohttp.ClientError, OSError):
            raise web.HTTPBadGateway from None
        lower = web.WebSocketResponse(
            autoping=False, autoclose=False, max_msg_size=MAX_FRAME_BYTES, compress=False, timeout=0.1
        )
        await lower.prepare(request)
        # There is no public attribute for the upper transport. A connection that was just cut has none.
        ends = (request.transport, upper._conn.transport if upper._conn is not None else None)
        connection = ProxiedConnection(component, [end for end in ends if end is not None])
        self._connections.add(connection)
        relays = [
            asyncio.create_task(self._relay(component, lower, upper, self._up[component])),
            asyncio.create_task(self._relay(component, upper, lower, self._down[component])),
        ]
        try:
            await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for relay in relays:
                relay.cancel()
            await asyncio.gather(*relays, return_exceptions=True)
            self._connections.discard(connection)
            connection.cut()
        return lower

    async def _relay(self, component: str, source: Any, sink: Any, decoder: Any) -> None:
        """Relay frames until either end is closed."""
        try:
            while True:
                frame = await source.receive()
                if frame.type is WSMsgType.BINARY:
                    await self._pass(component, decoder.decode(frame.data), sink)
                elif frame.type is WSMsgType.PING:
                    await sink.ping(frame.data)
                elif frame.type is WSMsgType.PONG:
                    await sink.pong(frame.data)
                elif frame.type is WSMsgType.CLOSE:
                    await sink.close(code=frame.data or 1000, message=(frame.extra or "").encode())
                    return
                else:
                    return
        except (aiohttp.ClientError, OSError) as error:
            log.debug("connection of %s: %s", component, error)

    async def _pass(self, component: str, messages: list[Any], sink: Any) -> None:
        waiting: list[Any] = []

        async def flush() -> None:
            if waiting:
                frame = encode_frame(waiting)
                waiting.clear()
                await sink.send_bytes(frame)

        for message in messages:
            name = type(message).__name__
            if self._due(component, name, "before"):
                await flush()
                self._inject_if_due(component, name, "before")
            waiting.append(message)
            self._on_message(component, message)
            if self._due(component, name, "after"):
                await flush()
                self._inject_if_due(component, name, "after")
        await flush()

    def _due(self, component: str, message: str, when: str) -> bool:
        return self.trigger is not None and self.trigger.moment == Moment(component, message, when)

    # --- plain HTTP ---

    async def _forward_to_coordinator(self, request: web.Request) -> web.StreamResponse:
        pull = request.path.startswith("/v1/batches/")
        return await self._forward(request, f"{self.coordinator}{request.path_qs}", "trainer", "Pull" if pull else "")

    async def _score(self, request: web.Request) -> web.StreamResponse:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.full_speed.wait(), SLOW_SECONDS)
        url = f"{self.rewards[request.match_info['reward']]}/{request.match_info['path']}"
        return await self._forward(request, url, "reward", "Score")

    async def _forward(self, request: web.Request, url: str, component: str, message: str) -> web.StreamResponse:
        if request.transport is None:  # the connection was just cut
            raise web.HTTPBadGateway
        connection = ProxiedConnection(component, [request.transport])
        self._connections.add(connection)
        try:
            body = await request.read()
            self._inject_if_due(component, message, "before")
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                data = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.Response(body=data, status=answer.status, headers=kept)
            await response.prepare(request)
            await response.write_eof()
            self._inject_if_due(component, message, "after")
            return response
        except (aiohttp.ClientError, OSError):
            raise web.HTTPBadGateway from None
        finally:
            self._connections.discard(connection)
