"""Time-outs of requests, with a server that answers reads and never answers writes."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob.kube.access import Access
from rljob.kube.errors import UnavailableError
from rljob.operator.object_kinds import BY_KEY
from rljob.operator.operator_client import OperatorClient

SERVICES = BY_KEY["Service"]


async def test_a_write_times_out_before_the_lease_expires():
    async def answer(request: web.Request) -> web.Response:
        if request.method != "GET":
            await asyncio.Event().wait()
        return web.json_response({"metadata": {"name": "a"}})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, OperatorClient(Access(str(server.make_url("")).rstrip("/"))) as client:
        client.limit_writes(0.05)
        async with asyncio.timeout(60.0):
            assert await client.get(SERVICES, "research", "a")
            with pytest.raises(UnavailableError):
                await client.create(SERVICES, "research", {})
            with pytest.raises(UnavailableError):
                await client.delete(SERVICES, "research", "a", "uid")
        assert client._timeout.total == 15.0, "the time-out of reads is unchanged"


def test_paths_of_children():
    assert BY_KEY["Deployment"].path() == "/apis/apps/v1/deployments"
    assert BY_KEY["Deployment"].api_version == "apps/v1"
