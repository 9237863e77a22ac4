"""Addresses at which the operator serves its metrics."""

import aiohttp
import pytest
from aiohttp import web

from rljob.operator.http_server import serving


async def answer(request):
    return web.Response(text="ok")


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_it_serves_at_an_address_of_either_family(host):
    app = web.Application()
    app.router.add_get("/", answer)
    async with serving(app, f"{host}:0") as port:
        assert await get(f"http://{host}:{port}/") == "ok"


async def test_without_a_host_it_serves_at_all_addresses(unused_tcp_port):
    app = web.Application()
    app.router.add_get("/", answer)
    async with serving(app, f":{unused_tcp_port}"):
        for host in ("127.0.0.1", "[::1]"):
            assert await get(f"http://{host}:{unused_tcp_port}/") == "ok"
