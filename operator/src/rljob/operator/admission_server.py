"""Serves AdmissionReviews to the API server with TLS, and passes them to kopf, which calls the handlers.

kopf's own server has no limit of its connections. This one is an HttpServer with the limits of every other server. The
path of a request is the id of a handler: /validate for rljob's own, others for handlers of a user's module.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from rljob.operator.config import WebhookSettings
from rljob.operator.metrics_server import TEXT, serving
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.frames import DECODE_ERRORS
from rljob.protocol.tls_connection import ServerCertificate, TlsProtocol

log = logging.getLogger(__name__)

LIMITS = HttpLimits(body_bytes=4 << 20, all_bodies_bytes=16 << 20)
"""A review holds the old and the new object, of 1.5 MiB each at most (the limit of etcd)."""

KopfFunction = Callable[..., Awaitable[Any]]
"""AdmissionReview, webhook=id of a handler → AdmissionReview with the response."""


class _Request(msgspec.Struct):
    """The fields of a request that kopf reads."""

    uid: str
    resource: dict[str, str]
    operation: str
    user: dict[str, Any] = msgspec.field(name="userInfo")
    new: dict[str, Any] | None = msgspec.field(name="object", default=None)
    old: dict[str, Any] | None = msgspec.field(name="oldObject", default=None)


class _Review(msgspec.Struct):
    request: _Request


class AdmissionServer:
    """ASGI application. It answers 503 until kopf has started and called :meth:`connect`.

    Reviews are handled one at a time: a flood of reviews delays a renewal of the Lease by one review, not by all.
    """

    def __init__(self) -> None:
        self._review: KopfFunction | None = None
        self._one = asyncio.Lock()

    def listening(self, settings: WebhookSettings) -> AbstractAsyncContextManager[int]:
        """Serve while entered; yields the port.

        Raises:
            ValueError: the certificate cannot be read.
            OSError: the address is in use or not local.
        """
        certificate = ServerCertificate(Path(settings.certificate), Path(settings.key))
        protocol = functools.partial(TlsProtocol, certificate)
        return serving(self, settings.listen, limits=LIMITS, http=protocol)

    async def connect(self, review: KopfFunction) -> AsyncIterator[Any]:
        """Take kopf's function, as kopf's protocol of admission servers demands, until kopf cancels it."""
        self._review = review
        try:
            yield {}  # the chart writes the configuration of the API server, not kopf
            await asyncio.Event().wait()
        finally:
            self._review = None

    async def __call__(self, scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Answer one request."""
        status, content_type, body = await self._answer(scope["method"], scope["path"].strip("/"), receive)
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, method: str, handler: str, receive: Any) -> tuple[int, str, bytes]:
        """Return status, content type and body of the answer to a request."""
        if method != "POST":
            return 405, TEXT, b"use POST\n"
        body = await _body(receive)
        async with self._one:
            if self._review is None:
                return 503, TEXT, b"the operator is starting or ending\n"
            try:
                review = msgspec.json.decode(body)
                msgspec.convert(review, _Review)
            except DECODE_ERRORS:
                return 400, TEXT, b"not an AdmissionReview\n"
            try:
                answer = await self._review(review, webhook=handler or None)
            except Exception:
                # Errors of handlers are part of the answer. The others are of a request that no API server sends, which
                # any peer may; a line for each would fill the log.
                log.debug("a review cannot be handled", exc_info=True)
                return 400, TEXT, b"the AdmissionReview cannot be handled\n"
        return 200, "application/json", msgspec.json.encode(answer)


async def _body(receive: Any) -> bytes:
    """Return the body of a request; b"" if the peer is gone, which then reads no answer."""
    body, more = b"", True
    while more:
        event = await receive()
        if event["type"] != "http.request":
            return b""
        more = event.get("more_body", False)
        body += event.get("body", b"")
    return body
