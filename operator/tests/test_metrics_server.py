"""What the operator serves over HTTP, and at which addresses."""

import aiohttp
import pytest

from rljob.operator.metrics import Metrics
from rljob.operator.metrics_server import build_app, serving


def app(ready=True):
    return build_app(Metrics(), lambda: ready)


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_it_serves_at_an_address_of_either_family(host):
    async with serving(app(), f"{host}:0") as port:
        assert await get(f"http://{host}:{port}/readyz") == (200, "ok\n")


async def test_without_a_host_it_serves_at_all_addresses(unused_tcp_port):
    async with serving(app(), f":{unused_tcp_port}"):
        for host in ("127.0.0.1", "[::1]"):
            assert await get(f"http://{host}:{unused_tcp_port}/readyz") == (200, "ok\n")


async def test_an_address_in_use_is_an_error():
    async with serving(app(), "127.0.0.1:0") as port:
        with pytest.raises(OSError, match="in use"):
            async with serving(app(), f"127.0.0.1:{port}"):
                pass


@pytest.mark.parametrize("ready, status", [(True, 200), (False, 503)])
async def test_it_is_ready_when_its_caches_are_filled(ready, status):
    async with serving(app(ready), "127.0.0.1:0") as port:
        assert (await get(f"http://127.0.0.1:{port}/readyz"))[0] == status
        assert "rljob_operator" in (await get(f"http://127.0.0.1:{port}/metrics"))[1]
        assert (await get(f"http://127.0.0.1:{port}/v1/status"))[0] == 404
