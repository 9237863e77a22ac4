"""A client of a model behind an API: it repeats a request until one of the servers answers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import aiohttp

from rljob.api.rewards import NotScored, Unavailable
from rljob.protocol.backoff import Backoff
from rljob.protocol.environment import pool_urls
from rljob.protocol.retry_after import retry_after_seconds
from rljob.protocol.watched_socket import reading_peer_socket

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.5, 8.0
RETRY_STATUSES = (408, 425, 429)
MAX_REPLY_BYTES = 4 << 20
MAX_REASON = 200  # characters of a reply in an error
MOST_FAILURES = 3  # servers that may end while they work on a message
KEPT_FAILURES = 4096  # messages whose failures are remembered


class _Request:
    """A request. ``sent``: when a server began to get it; None: there is no connection yet."""

    def __init__(self) -> None:
        self.sent: float | None = None

    def had_most_since(self, began: float) -> bool:
        """Whether a server has had the request for most of the time."""
        return self.sent is not None and monotonic() - self.sent >= self.sent - began


def _tracing() -> aiohttp.TraceConfig:
    async def sent(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
        context.trace_request_ctx.sent = monotonic()

    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(sent)
    return tracing


class ModelApi:
    """Posts requests to a model. Its connections belong to the event loop of the first request.

    Args:
        urls: addresses for the requests, of servers with the same model; used in turn.
        noun: what the model is to the reward, for errors.
        token: sent as bearer token; empty: none.
        returns: whether servers that are gone come back: engines of the job, which are replaced. Then the time until
            they do is none of the sample's, and a message that ends several of them is not sent again.
    """

    def __init__(self, urls: Sequence[str], noun: str, token: str = "", returns: bool = False) -> None:
        self._urls = itertools.cycle(urls)
        self._noun = noun
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._returns = returns
        self._failures: Counter[bytes] = Counter()  # message → servers that ended while they worked on it
        self._session: aiohttp.ClientSession | None = None
        self._unavailable = False

    async def post(self, fields: Mapping[str, Any]) -> bytes:
        """Return the complete reply to a request. The request is repeated while the API does not answer; the time limit
        of the sample ends it.

        Raises:
            NotScored: the API refuses the request, its reply is too long, or several servers ended on it; after a
                cancellation, it did not answer until then.
            Unavailable: after a cancellation, there was no server for most of the time, and one will come back.
        """
        body = json.dumps(fields).encode()
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        problem, gone, began = "", False, monotonic()
        request: _Request | None = None
        try:
            while True:
                url, wait, request = next(self._urls), 0.0, _Request()
                try:
                    status, headers, reply = await self._post(url, body, request)
                except (aiohttp.ClientError, OSError) as error:
                    problem = str(error) or type(error).__name__
                    gone = request.sent is None
                    failed = not gone
                else:
                    if status == 200:
                        self._report(url, None)
                        if len(reply) > MAX_REPLY_BYTES:
                            raise NotScored(f"the {self._noun}'s reply is longer than {MAX_REPLY_BYTES:,} bytes")
                        return reply
                    problem = f"HTTP {status}: {' '.join(reply[:MAX_REASON].decode(errors='replace').split())}"
                    if status < 500 and status not in RETRY_STATUSES:
                        raise NotScored(f"the {self._noun} refused the request ({problem})")
                    wait = retry_after_seconds(headers.get("Retry-After"))
                    gone, failed = status == 503, status == 500
                if self._returns and failed:
                    self._count_failure(body, problem)
                self._report(url, problem)
                request = None
                await asyncio.sleep(max(wait, 0.0) + backoff.next())
        except asyncio.CancelledError:
            if request is not None and request.sent is None:
                gone, problem = True, problem or "no connection within the time limit"
            has_had_time = request is not None and request.had_most_since(began)
            if self._returns and gone and not has_had_time:
                raise Unavailable(f"no engine of the {self._noun} answers ({problem})") from None
            if problem:
                raise NotScored(f"the {self._noun} did not answer in time ({problem})") from None
            raise

    def _count_failure(self, body: bytes, problem: str) -> None:
        """Count a server that ended while it worked on a message.

        Raises:
            NotScored: it is the last one that the message gets.
        """
        key = hashlib.blake2b(body, digest_size=16).digest()
        self._failures[key] += 1
        if self._failures[key] == MOST_FAILURES:
            del self._failures[key]
            raise NotScored(f"the {self._noun} failed {MOST_FAILURES} times on this request ({problem})")
        if len(self._failures) > KEPT_FAILURES:
            del self._failures[next(iter(self._failures))]

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, body: bytes, request: _Request) -> tuple[int, Any, bytes]:
        if self._session is None:  # it needs the loop of a worker
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, socket_factory=reading_peer_socket),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                trace_configs=[_tracing()],
            )
        async with self._session.post(url, data=body, allow_redirects=False, trace_request_ctx=request) as response:
            reply = bytearray()
            while len(reply) <= MAX_REPLY_BYTES and (part := await response.content.read(1 << 16)):
                reply += part
            return response.status, response.headers, bytes(reply)

    def _report(self, url: str, problem: str | None) -> None:
        """Log the first of several failures, and the end of them."""
        if problem is not None and not self._unavailable:
            log.warning("the %s at %s does not answer (%s); asking again", self._noun, url, problem)
        elif problem is None and self._unavailable:
            log.warning("the %s at %s answers again", self._noun, url)
        self._unavailable = problem is not None


def urls_of_pool(pool: str) -> list[str]:
    """Return the addresses of the engines of a frozen pool.

    Raises:
        ValueError: the job has no such pool.
    """
    known = pool_urls()
    if pool not in known:
        raise ValueError(f"pool {pool!r} is not in RLJOB_POOL_URLS, which rljob sets; there are {[*known]}")
    return list(known[pool])
