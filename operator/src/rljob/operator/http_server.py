"""/healthz, /readyz and /metrics of the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rljob.operator.metrics import Metrics
from rljob.protocol.startup import host_and_port


def build_app(metrics: Metrics, ready: Callable[[], bool]) -> web.Application:
    """Return the application. ``ready``: the caches are filled, or the operator is on standby."""

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")  # a blocked event loop does not answer

    async def readyz(request: web.Request) -> web.Response:
        if ready():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="the caches are not filled yet\n")

    async def show_metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", show_metrics)
    return app


@asynccontextmanager
async def serving(app: web.Application, listen: str) -> AsyncIterator[int]:
    """Serve ``app`` at host:port while entered; yield the port.

    Raises:
        OSError: the address is in use or not local.
    """
    host, port = host_and_port(listen)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host or None, int(port))
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
