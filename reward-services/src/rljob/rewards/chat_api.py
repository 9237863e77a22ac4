"""A client of the chat completions of an API compatible with OpenAI's."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp

from rljob.api.rewards import NotScored
from rljob.protocol.backoff import Backoff
from rljob.protocol.retry_after import retry_after_seconds

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.5, 8.0
RETRY_STATUSES = (408, 425, 429)
MAX_REPLY_BYTES = 4 << 20
MAX_REASON = 200  # characters of a reply in an error


class ChatApi:
    """Sends one message at a time to a model. Its connections belong to the event loop of the first request.

    Args:
        url: base address, with the version of the API.
        model: name of the model.
        max_tokens: limit of a reply.
        temperature: of the model.
        token: sent as bearer token; empty: none.
    """

    def __init__(self, url: str, model: str, max_tokens: int, temperature: float, token: str = "") -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "stream": False}
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._session: aiohttp.ClientSession | None = None
        self._unavailable = False

    async def ask(self, message: str) -> str:
        """Return the complete reply to a message. The request is repeated while the API does not answer; the time limit
        of the sample ends it.

        Raises:
            NotScored: the API refuses the request, or its reply is no complete text; after a cancellation, it did not
                answer until then.
        """
        body = json.dumps(self._settings | {"messages": [{"role": "user", "content": message}]}).encode()
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        problem = ""
        try:
            while True:
                wait = 0.0
                try:
                    status, headers, reply = await self._post(body)
                except (aiohttp.ClientError, OSError) as error:
                    problem = str(error) or type(error).__name__
                else:
                    if status == 200:
                        self._report(None)
                        return _text_of(reply)
                    problem = f"HTTP {status}: {' '.join(reply[:MAX_REASON].decode(errors='replace').split())}"
                    if status < 500 and status not in RETRY_STATUSES:
                        raise NotScored(f"the judge refused the request ({problem})")
                    wait = retry_after_seconds(headers.get("Retry-After"))
                self._report(problem)
                await asyncio.sleep(max(wait, 0.0) + backoff.next())
        except asyncio.CancelledError:
            if problem:
                raise NotScored(f"the judge did not answer in time ({problem})") from None
            raise

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: bytes) -> tuple[int, Any, bytes]:
        if self._session is None:  # it needs the loop of a worker
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        async with self._session.post(self._url, data=body, allow_redirects=False) as response:
            reply = bytearray()
            while len(reply) <= MAX_REPLY_BYTES and (part := await response.content.read(1 << 16)):
                reply += part
            return response.status, response.headers, bytes(reply)

    def _report(self, problem: str | None) -> None:
        """Log the first of several failures, and the end of them."""
        if problem is not None and not self._unavailable:
            log.warning("the judge at %s does not answer (%s); asking again", self._url, problem)
        elif problem is None and self._unavailable:
            log.warning("the judge at %s answers again", self._url)
        self._unavailable = problem is not None


def _text_of(reply: bytes) -> str:
    """Return the text of a reply.

    Raises:
        NotScored: it is too long, no chat completion, or the model did not end it.
    """
    if len(reply) > MAX_REPLY_BYTES:
        raise NotScored(f"the judge's reply is longer than {MAX_REPLY_BYTES:,} bytes")
    try:
        choice = json.loads(reply)["choices"][0]
        finish, text = choice.get("finish_reason"), choice["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise NotScored(f"the judge answered something else than a chat completion ({error!r})") from None
    if finish != "stop":
        raise NotScored(f"the judge's reply is not complete (finish_reason {finish!r}); raise maxTokens")
    if not isinstance(text, str):
        raise NotScored("the judge's reply has no text")
    return text
