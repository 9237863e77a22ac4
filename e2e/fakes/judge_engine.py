"""An engine of a frozen pool that a manifest of a test names as module:attribute: its judge answers at once.

    python -m e2e.fakes.judge_engine PORT

A message that contains ``kill the engine`` ends the server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from e2e.fakes.chat_server import ChatServer
from rljob.api.roles import Rollout
from rljob.rollout.adapters.base import Launch

KEY = "JUDGE_ENGINE_KEY"


class JudgeEngine:
    """An adapter whose server serves a frozen model, and nothing else."""

    in_flight = ("keep",)

    def __init__(self, pool: Rollout, model: Path) -> None:
        self._pool = pool

    def problems(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def launch(self, port: int, key: str) -> Launch:
        """Raise: it has no policy."""
        raise NotImplementedError

    def launch_frozen(self, port: int, key: str) -> Launch:
        """Return the command of the server."""
        return Launch([sys.executable, "-m", "e2e.fakes.judge_engine", str(port), *self._pool.args], {KEY: key})

    def connect(self, port: int, key: str) -> Any:
        """Return a client that only looks at the health."""
        return _Client(f"http://127.0.0.1:{port}")

    def find_error(self, lines: Iterable[str]) -> str:
        """Return the last line."""
        return [*lines, ""][-1]


class _Client:
    def __init__(self, url: str) -> None:
        self._url = url

    async def healthy(self) -> bool:
        """Return whether the server answers."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def reply(message: str) -> str:
    """Return a verdict, or end the process."""
    if "kill the engine" in message:
        os._exit(1)
    return "Fair. <score>4</score>"


@web.middleware
async def require_key(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests without the key, except for the health."""
    if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
        return web.Response(status=401)
    return await handler(request)


async def healthy(request: web.Request) -> web.Response:
    """Answer that the server is up."""
    return web.Response()


def main() -> None:
    """Serve on loopback."""
    app = ChatServer(reply).app()
    app.middlewares.append(require_key)
    app.router.add_get("/health", healthy)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
