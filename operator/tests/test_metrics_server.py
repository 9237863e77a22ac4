"""What the operator serves over HTTP, and at which addresses."""

import asyncio

import aiohttp
import pytest

from rljob.operator import metrics_server
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


async def health(liveness):
    """Return status and body of /healthz, and the status of a write to it."""
    async with (
        serving(build_app(Metrics(), lambda: False, liveness), "127.0.0.1:0") as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/healthz") as written,
    ):
        return *await get(f"http://127.0.0.1:{port}/healthz"), written.status


@pytest.mark.parametrize("status", [200, 500])
async def test_healthz_is_the_bounded_answer_of_kopf(monkeypatch, status):
    monkeypatch.setattr(metrics_server, "KOPF_BYTES", 10)

    async def kopf(_scope, _receive, send):
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"17")]})
        await send({"type": "http.response.body", "body": b'{"leader": false}'})

    async with serving(kopf, "127.0.0.1:0") as port:
        assert await health(f"http://127.0.0.1:{port}/healthz") == (status, '{"leader":', 405)


async def test_healthz_fails_before_kopf_listens(unused_tcp_port):
    url = f"http://127.0.0.1:{unused_tcp_port}/healthz"
    assert await health(url) == (503, "kopf does not answer: ClientConnectorError\n", 405)


async def test_healthz_fails_while_kopf_does_not_answer(monkeypatch):
    monkeypatch.setattr(metrics_server, "KOPF_SECONDS", 0.01)

    async def silent(reader, writer):
        await reader.read(-1)  # until the client gives up
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/healthz"
        assert await health(url) == (503, "kopf does not answer: TimeoutError\n", 405)


async def test_healthz_without_a_liveness_server_says_that_the_process_answers():
    assert await health("") == (200, "ok\n", 405)
