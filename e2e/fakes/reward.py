"""A fake reward service: 0 or 1 by the text of the completion."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import msgspec
from aiohttp import web

from e2e.fakes.tokens import reward
from rljob.protocol.environment import read_environment
from rljob.protocol.heartbeat import beating
from rljob.protocol.score_messages import Score, ScoreItem, ScoreReply, ScoreRequest

log = logging.getLogger(__name__)


ScoreFunction: TypeAlias = Callable[[ScoreItem], float | str]
"""Returns the reward of a sample, or the error for which it has none."""


def by_text(item: ScoreItem) -> float | str:
    """Return 0 or 1 by the text of the completion."""
    return reward(item.completion)


def build_app(score_function: ScoreFunction = by_text) -> web.Application:
    """Return the application."""

    async def score(request: web.Request) -> web.Response:
        items = msgspec.json.decode(await request.read(), type=ScoreRequest).items
        log.info("scoring %d samples.", len(items))
        scores = []
        for item in items:
            result = score_function(item)
            scores.append(
                Score(item.sample, 0, {}, result) if isinstance(result, str) else Score(item.sample, result, {}, "")
            )
        return web.Response(body=msgspec.json.encode(ScoreReply(scores)), content_type="application/json")

    async def beat(_: web.Application) -> AsyncIterator[None]:
        with beating():
            yield

    app = web.Application()
    app.cleanup_ctx.append(beat)
    app.router.add_post("/v1/score", score)
    return app


def main() -> None:
    """Serve at the address of the environment."""
    logging.basicConfig(level=logging.INFO)
    environment = read_environment()
    web.run_app(build_app(), host=environment.listen_host, port=environment.listen_port, access_log=None, print=None)


if __name__ == "__main__":
    main()
