"""What an answer of the API server stands for, and how a watch is cut into lines."""

import msgspec
import pytest

from rljob.operator import errors
from rljob.operator.kube import _lines
from rljob.operator.resources import BY_KIND, PODS, RLJOBS


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", errors.NotFoundError),
        (409, "Conflict", errors.ConflictError),
        (409, "AlreadyExists", errors.AlreadyExistsError),
        (410, "Expired", errors.GoneError),
        (422, "Invalid", errors.InvalidError),
        (403, "Forbidden", errors.ForbiddenError),
        (429, "TooManyRequests", errors.TooManyRequestsError),
        (500, "InternalError", errors.UnavailableError),
        (503, "", errors.UnavailableError),
        (401, "Unauthorized", errors.ApiError),
    ],
)
def test_an_answer_becomes_the_error_it_stands_for(code, reason, kind):
    error = errors.error_of(code, msgspec.json.encode({"reason": reason, "message": "no"}), "3")
    assert type(error) is kind and error.message == "no" and error.retry_after == 3.0


def test_an_answer_of_a_proxy_is_told_as_it_is():
    error = errors.error_of(502, b"<html>bad gateway")
    assert isinstance(error, errors.UnavailableError) and "bad gateway" in error.message


def test_paths_follow_the_api():
    assert PODS.path("n", "p") == "/api/v1/namespaces/n/pods/p"
    assert RLJOBS.path("n", "j", "status") == "/apis/rljob.dev/v1alpha1/namespaces/n/rljobs/j/status"
    assert BY_KIND["Deployment"].path() == "/apis/apps/v1/deployments"
    assert BY_KIND["Deployment"].api_version == "apps/v1" and PODS.api_version == "v1"


class Stream:
    def __init__(self, *chunks):
        self.chunks = chunks

    async def iter_any(self):
        for chunk in self.chunks:
            yield chunk


async def test_lines_of_a_watch_are_whole_however_they_arrive():
    long = b"x" * 300_000
    chunks = [b'{"a"', b":1}\n", b"\n{}", b"\n" + long[:100_000], long[100_000:], b"\nrest"]
    assert [line async for line in _lines(Stream(*chunks))] == [b'{"a":1}', b"{}", long]
