"""An engine's HTTP server for tests of its client: it records requests and gives the answers of the test."""

import contextlib
import json

from aiohttp import web


class FakeServer:
    """Answers every request with ``answer``, or with that of its path in ``answers``, and records the request."""

    def __init__(self):
        self.answer, self.answers, self.status, self.calls = {}, {}, 200, []

    async def handle(self, request):
        body = await request.text()
        self.calls.append((request.path_qs, json.loads(body) if body else None, request.headers.get("Authorization")))
        answer = self.answers.get(request.path, self.answer)
        if callable(answer):
            answer = await answer(self.calls[-1][1])
        if isinstance(answer, bytes):
            return web.Response(body=answer, status=self.status)
        return web.json_response(answer, status=self.status)


@contextlib.asynccontextmanager
async def serving():
    """Yield a server with its address in ``url``."""
    fake = FakeServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield fake
    await runner.cleanup()
