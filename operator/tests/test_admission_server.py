"""Reviews over HTTPS: passed to kopf one at a time, bounded, refused with one sentence if no API server sent them."""

import asyncio
import contextlib
import io
import json
import ssl

import aiohttp
import pytest

from core.tests.certificates import certificate
from rljob.operator.admission_server import LIMITS, AdmissionServer
from rljob.operator.config import WebhookSettings

REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "1",
        "resource": {"group": "rljob.dev", "version": "v1alpha1", "resource": "rljobs"},
        "operation": "CREATE",
        "userInfo": {"username": "jane"},
        "object": {"metadata": {"name": "sums"}, "spec": {}},
        "oldObject": None,
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls") / "webhook", "IP:127.0.0.1")


@contextlib.asynccontextmanager
async def served(made, review=None):
    """Serve, connected to the function ``review``; yield a function that posts a body and returns status and answer."""
    server = AdmissionServer()
    settings = WebhookSettings(listen="127.0.0.1:0", certificate=str(made[0]), key=str(made[1]))
    trust = ssl.create_default_context(cafile=str(made[0]))
    async with server.listening(settings) as port, aiohttp.ClientSession() as session:

        async def post(body=REVIEW, path="validate", method="POST"):
            data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
            url = f"https://127.0.0.1:{port}/{path}"
            async with session.request(method, url, data=data, ssl=trust) as response:
                return response.status, await response.text()

        if review is None:
            yield post
            return
        connected = server.connect(review)
        assert await anext(connected) == {}, "the configuration of the API server is the chart's"
        try:
            yield post
        finally:
            await connected.aclose()


async def test_a_review_is_answered_by_the_handler_of_its_path(made):
    async def review(request, webhook):
        return {"response": {"uid": request["request"]["uid"], "allowed": webhook == "acme"}}

    async with served(made, review) as post:
        assert await post() == (200, '{"response":{"uid":"1","allowed":false}}')
        assert await post(path="acme") == (200, '{"response":{"uid":"1","allowed":true}}')


async def test_before_kopf_has_started_the_webhook_is_not_available(made):
    async with served(made) as post:
        assert await post() == (503, "the operator is starting or ending\n")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        [],
        {},
        {"request": 1},
        {"request": {**REVIEW["request"], "object": [1]}},
        {"request": {**REVIEW["request"], "resource": {"group": 1}}},
    ],
)
async def test_what_is_no_review_is_refused(made, body):
    async def review(request, webhook):
        raise AssertionError("kopf must not see it")

    async with served(made, review) as post:
        assert await post(body) == (400, "not an AdmissionReview\n")


async def test_a_review_that_kopf_cannot_handle_is_refused_without_a_line_in_the_log(made, caplog):
    async def review(request, webhook):
        raise KeyError("group")

    async with served(made, review) as post:
        assert await post() == (400, "the AdmissionReview cannot be handled\n")
    assert not [record for record in caplog.records if record.levelname != "INFO"]


async def test_a_large_body_and_another_method_are_refused(made):
    async with served(made) as post:
        assert (await post(b" " * (LIMITS.body_bytes + 1)))[0] == 413
        assert (await post(method="GET"))[0] == 405


async def test_reviews_are_handled_one_at_a_time(made):
    running, most = 0, 0

    async def review(request, webhook):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return {}

    async with served(made, review) as post:
        assert await asyncio.gather(*(post() for _ in range(5))) == [(200, "{}")] * 5
    assert most == 1


def test_a_certificate_that_cannot_be_read_is_one_sentence(tmp_path):
    settings = WebhookSettings(listen="127.0.0.1:0", certificate=str(tmp_path / "none"), key=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no certificate with its key: No such file or directory"):
        AdmissionServer().listening(settings)
