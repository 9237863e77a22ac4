"""A fake of an API compatible with OpenAI's: chat completions whose text a function gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[str], str | web.StreamResponse]


def completion(text: str | None, finish: str = "stop") -> dict[str, Any]:
    """Return the body of a chat completion."""
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


class ChatServer:
    """Answers each message with ``reply``, which returns a text or a whole response.

    ``messages``: the messages. ``bodies``: the requests. ``tokens``: the header Authorization of each.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.messages: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = body["messages"][-1]["content"]
        self.bodies.append(body)
        self.messages.append(message)
        self.tokens.append(request.headers.get("Authorization"))
        found = self.reply(message)
        return web.json_response(completion(found)) if isinstance(found, str) else found

    def app(self) -> web.Application:
        """Return the application, for a test server or ``web.run_app``."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app


@contextmanager
def serving(server: ChatServer) -> Iterator[str]:
    """Serve in a thread of its own; yields the base address."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.app())
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
