"""A reward service that knows nothing: 0 or 1 by the answer's text."""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web

from e2e.fakes.tokens import reward
from rljob.protocol.environment import read_environment
from rljob.protocol.rewards import Score, ScoreReply, ScoreRequest

log = logging.getLogger(__name__)


async def score(request: web.Request) -> web.Response:
    """Answer /v1/score."""
    items = msgspec.json.decode(await request.read(), type=ScoreRequest).items
    log.info("scoring %d samples.", len(items))
    reply = ScoreReply([Score(item.sample, reward(item.completion), {}, "") for item in items])
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def build_app() -> web.Application:
    """Return the application."""
    app = web.Application()
    app.router.add_post("/v1/score", score)
    return app


def main() -> None:
    """Serve where the environment says."""
    logging.basicConfig(level=logging.INFO)
    environment = read_environment()
    web.run_app(build_app(), host=environment.listen_host, port=environment.listen_port, access_log=None, print=None)


if __name__ == "__main__":
    main()
