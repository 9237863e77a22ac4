"""A fake of an API compatible with OpenAI's: chat completions whose text a function gives."""

from __future__ import annotations

from collections.abc import Callable
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
