"""A server of S3 (moto) for tests, and the variables with which botocore finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem


@contextmanager
def serving_s3() -> Iterator[dict[str, str]]:
    """Serve S3 on a free port; yield the variables of a client."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield {
            "AWS_ENDPOINT_URL_S3": "http://{}:{}".format(*server.get_host_and_port()),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
    finally:
        server.stop()


def empty_bucket(name: str) -> S3FileSystem:
    """Create a bucket, or empty it: all servers of a process have the same content. Return its file system."""
    files = S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    if files.exists(name):
        files.rm(name, recursive=True)
    files.mkdir(name)
    return files
