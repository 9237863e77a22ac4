"""POST /v1/batches/STEP/shard, of which every data-parallel rank sends one in each step.

It is a route of Starlette: FastAPI's parameters cost as much CPU time as packing a dozen samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rljob.coordinator.batches import BatchShards
from rljob.coordinator.ledger_api import MAX_NUMBER
from rljob.protocol.shards import SelectionError

if TYPE_CHECKING:
    from rljob.coordinator.run import Run


def shard_route(run: Run, allowed: Callable[[str, str], bool]) -> Route:
    """Return the route. ``allowed``: whether a role may send a request with this header Authorization."""
    shards = BatchShards(run.ledger)

    async def batch_shard(request: Request) -> Response:
        if not allowed("trainer", request.headers.get("authorization", "")):
            raise HTTPException(401, "this request requires the trainer's token")
        step = _number("step", request.path_params["step"])
        incarnation = _number("incarnation", request.query_params.get("incarnation", ""))
        if incarnation != run.trainer.session.incarnation:
            raise HTTPException(409, f"incarnation {incarnation} was superseded by {run.trainer.session.incarnation}")
        try:
            body = await asyncio.to_thread(shards.shard, step, await request.body())
        except LookupError as error:
            raise HTTPException(404, str(error)) from None
        except SelectionError as error:
            raise HTTPException(422, str(error)) from None
        return Response(body, media_type="application/octet-stream")

    return Route("/v1/batches/{step}/shard", batch_shard, methods=["POST"])


def _number(name: str, text: str) -> int:
    """Return a number of a URL.

    Raises:
        HTTPException: it is not a number from 0 to MAX_NUMBER.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(MAX_NUMBER)) or int(text) > MAX_NUMBER:
        raise HTTPException(422, f"{name} must be a number from 0 to {MAX_NUMBER}")
    return int(text)
