"""Attempts to reach a server of S3: few when it never answers, several when an error may pass."""

from __future__ import annotations

import socket

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ProfileNotFound
from s3fs import S3FileSystem

from rljob.protocol import s3_access
from rljob.protocol.model_cache import ModelUnavailableError


def answered(status: int, code: str) -> ClientError:
    return ClientError({"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}, "GetObject")  # type: ignore[typeddict-item]


def test_a_server_that_never_answers_is_one_sentence_after_the_attempts_of_s3fs(monkeypatch):
    assert s3_access.READ_SECONDS * S3FileSystem.retries <= 75
    monkeypatch.setattr(s3_access, "READ_SECONDS", 0.05)
    monkeypatch.setattr(S3FileSystem, "retries", 2)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        files = s3_access.open_s3(address)
        sentence = rf"^s3://bucket/model/ cannot be reached at {address} \(Read timeout .*\); check the network and "
        with (
            pytest.raises(ModelUnavailableError, match=sentence),
            s3_access.explained_errors("bucket/model", None, address),
        ):
            files.ls("bucket/model")
        server.setblocking(False)
        for _ in range(2):
            server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("error", "repeated"),
    [
        (answered(503, "ServiceUnavailable"), True),
        (answered(500, "InternalError"), True),
        (answered(400, "RequestTimeout"), True),
        (answered(403, "AccessDenied"), False),
        (answered(404, "NoSuchBucket"), False),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), True),
        (ProfileNotFound(profile="none"), False),
    ],
)
def test_an_error_that_may_pass_is_repeated(error, repeated):
    assert s3_access._may_pass(error) == repeated
