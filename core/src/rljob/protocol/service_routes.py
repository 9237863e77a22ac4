"""What the HTTP applications of all services share: refusals, bodies, probes and metrics."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect

from rljob.protocol.json_values import has_more_marks

RETRY_SECONDS = "1"
NO_TOKEN = "this request requires the token that rljob gave to the job's runner"
MAX_REQUEST_MARKS = 1 << 20
"""Strings of a request, and brackets that open and commas outside strings: see :mod:`rljob.protocol.json_values`. Each
takes up to 64 bytes of memory, beside the text."""


class RequestRejectedError(Exception):
    """A request is answered with ``status`` and this sentence."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers

    def response(self) -> Response:
        """Return the answer to the request."""
        return Response(f"{self}\n", self.status, self.headers, media_type="text/plain")


def busy(sentence: str) -> RequestRejectedError:
    """Return the refusal of a request that its client repeats later."""
    return RequestRejectedError(429, sentence, {"Retry-After": RETRY_SECONDS})


def unavailable(sentence: str) -> RequestRejectedError:
    """Return the refusal of a request that the service cannot handle yet; its client repeats it later."""
    return RequestRejectedError(503, sentence, {"Retry-After": RETRY_SECONDS})


async def read_body(request: Request) -> bytes:
    """Return the body, whose length :class:`rljob.protocol.http_server.HttpServer` bounds.

    Raises:
        RequestRejectedError: it is incomplete.
    """
    try:
        return await request.body()
    except ClientDisconnect:
        raise RequestRejectedError(400, "the body is incomplete") from None


def check_marks(body: bytes, remedy: str) -> None:
    """Check the number of values of a request's JSON, before it is decoded.

    Raises:
        RequestRejectedError: the JSON has too many; the client sends ``remedy``.
    """
    if has_more_marks(body, MAX_REQUEST_MARKS):
        raise RequestRejectedError(
            413, f"the request has more than {MAX_REQUEST_MARKS:,} strings, brackets and commas; send {remedy}"
        )


def add_probes(app: FastAPI, registry: CollectorRegistry, not_ready: Callable[[], str] = str) -> None:
    """Add /healthz, /readyz and /metrics. ``not_ready`` says why the service is not ready; empty: it is."""

    async def ok() -> Response:
        return Response("ok\n", media_type="text/plain")

    async def ready() -> Response:
        return unavailable(reason).response() if (reason := not_ready()) else await ok()

    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/healthz", ok)
    app.add_api_route("/readyz", ready)
    app.add_api_route("/metrics", metrics)
