"""Connection of a process to the coordinator: one WebSocket, which reconnects after every disconnect.

Used by agents, runners and trainer rank 0. ``register`` is called on every connect, and the messages that it returns
are sent first: the registration, then every message that is not acknowledged yet. Messages sent while the link is
disconnected are dropped, because the next registration repeats them. Sends are batched: all messages of one event loop
iteration share a frame. A message is encoded when it is queued, so that its sender gets an encoding error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import aiohttp
import msgspec

from rljob.protocol.backoff import Backoff
from rljob.protocol.frames import DECODE_ERRORS, MAX_FRAME_BYTES, encode, encode_frame, frame_decoder, frame_length
from rljob.protocol.shared_messages import Reject

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 2.0
PING_SECONDS = 20.0
"""Both peers send pings at this interval, and close a connection without an answer."""


class RefusedError(Exception):
    """The coordinator rejects this process permanently; a retry has the same result."""


class MessageLink(Protocol):
    """The connection of a process to the coordinator, over any transport."""

    def send(self, message: Any) -> None:
        """Queue ``message``. Without a connection it is dropped: the next registration repeats it."""

    def messages(self) -> AsyncIterator[Any]:
        """Yield incoming messages forever, and reconnect."""


class CoordinatorLink:
    """The connection of one process over a WebSocket; a :class:`MessageLink`.

    Args:
        url: address of the coordinator, for example http://127.0.0.1:8000.
        role: agent, trainer or runner.
        token: the role's token.
        incoming: union of the messages that the process receives, for example ToAgent.
        register: function that returns the messages to send first on every connect.
    """

    def __init__(self, url: str, role: str, token: str, incoming: Any, register: Callable[[], list[Any]]) -> None:
        self._url = f"{url.rstrip('/')}/v1/connect/{role}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._decoder = frame_decoder(incoming)
        self._register = register
        self._outbox: list[msgspec.Raw] = []
        self._wake = asyncio.Event()
        self.connected = False

    def send(self, message: Any) -> None:
        """Queue ``message``. Without a connection it is dropped (see the module's docstring).

        Raises:
            TypeError: msgpack cannot encode the message.
        """
        if self.connected:
            self._outbox.append(encode(message))
            self._wake.set()

    async def messages(self) -> AsyncIterator[Any]:
        """Yield incoming messages forever, and reconnect with backoff.

        Raises:
            RefusedError: the coordinator answered Reject(fatal=True) or HTTP 401 or 403, or sent an undecodable frame.
        """
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while True:
                try:
                    async with session.ws_connect(
                        self._url, max_msg_size=MAX_FRAME_BYTES, heartbeat=PING_SECONDS
                    ) as socket:
                        backoff.reset()
                        async for message in self._serve(socket):
                            yield message
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise RefusedError(
                            f"the coordinator rejected this process's token (HTTP {error.status})"
                        ) from None
                    log.info("coordinator not ready: HTTP %s", error.status)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    log.info("no connection to the coordinator: %s", error)
                await backoff.wait()

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Any]:
        self._outbox = [encode(message) for message in self._register()]
        self._wake.set()
        self.connected = True
        sender = asyncio.create_task(self._send_frames(socket))
        try:
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    continue
                try:
                    batch = self._decoder.decode(frame.data)
                except DECODE_ERRORS as error:
                    raise RefusedError(f"the coordinator uses another version of the protocol: {error}") from None
                for message in batch:
                    if isinstance(message, Reject):
                        if message.fatal:
                            raise RefusedError(message.reason)
                        log.warning("rejected: %s", message.reason)
                    else:
                        yield message
        finally:
            self.connected = False
            sender.cancel()

    async def _send_frames(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    count = frame_length(self._outbox)
                    frame, self._outbox = self._outbox[:count], self._outbox[count:]
                    await socket.send_bytes(encode_frame(frame))
        except (aiohttp.ClientError, OSError) as error:
            log.info("connection to the coordinator lost while sending: %s", error)
            await socket.close()
