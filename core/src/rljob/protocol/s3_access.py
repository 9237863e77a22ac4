"""S3 through s3fs, and its errors as sentences. Credentials and address are those of botocore: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY or another source of credentials, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, NoCredentialsError, PartialCredentialsError
from s3fs import S3FileSystem
from s3fs.core import set_custom_error_handler

from rljob.protocol.full_disk import FULL_DISK
from rljob.protocol.model_cache import ModelUnavailableError

CREDENTIALS_REMEDY = (
    "give credentials that may use it: the variables of AWS for rljob run, in a cluster the Secret in "
    "spec.downloads.secret"
)
CONNECT_SECONDS, READ_SECONDS = 5.0, 15.0
"""Limits of an attempt: to connect, and between the end of a request, of any size, and each part of its answer."""
BUSY = frozenset({"RequestTimeout", "SlowDown", "Throttling", "TooManyRequests"})  # codes of S3 servers


def open_s3(endpoint: str | None = None) -> S3FileSystem:
    """Return a file system that reads the present state of S3 at ``endpoint``; None: the address of botocore.

    s3fs makes five attempts (``S3FileSystem.retries``), so that a server that never answers is an error after 75 s.
    botocore makes one for each of them: with its five the error would come after seven minutes.
    """
    set_custom_error_handler(_may_pass)
    limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"total_max_attempts": 1}}
    return S3FileSystem(skip_instance_cache=True, use_listings_cache=False, endpoint_url=endpoint, config_kwargs=limits)


def _may_pass(error: Exception) -> bool:
    """Return whether another attempt may succeed, of the errors that botocore repeats and s3fs alone does not."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or error.response.get("Error", {}).get("Code") in BUSY
    return isinstance(error, ConnectionError)


@contextmanager
def explained_errors(path: str, target: Path | None = None, endpoint: str | None = None) -> Iterator[None]:
    """Turn errors of s3fs, which raises errors of Python for most responses, into sentences.

    Args:
        path: BUCKET/PREFIX.
        target: directory of a download, for the error of a full disk.
        endpoint: as for :func:`open_s3`.

    Raises:
        ValueError: a user must change something.
        ModelUnavailableError: another attempt may succeed.
    """
    try:
        yield
    except ModelUnavailableError:
        raise
    except (BotoCoreError, ClientError) as error:
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            raise ValueError(f"S3 refuses access to s3://{path}/ ({error}); {CREDENTIALS_REMEDY}") from error
        raise _unreachable(path, error, endpoint) from error
    except OSError as error:
        if error.filename is not None:  # of a file on this machine
            raise
        raise _explained(path, error, target, endpoint) from error


@contextmanager
def removed_on_failure(directory: Path) -> Iterator[None]:
    """Remove the directory of a download that fails. After success it has another name."""
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _explained(path: str, error: OSError, target: Path | None, endpoint: str | None) -> Exception:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"there is no bucket or prefix s3://{path}/; correct it")
    if isinstance(error, PermissionError):
        return ValueError(f"S3 refuses access to s3://{path}/ ({error}); {CREDENTIALS_REMEDY}")
    if error.errno in FULL_DISK:
        return ModelUnavailableError(f"s3://{path}/ does not fit the disk of {target}; make room there")
    return _unreachable(path, error, endpoint)


def _unreachable(path: str, error: Exception, endpoint: str | None) -> ModelUnavailableError:
    address = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
    return ModelUnavailableError(
        f"s3://{path}/ cannot be reached at {address} ({error}); check the network and spec.downloads.s3Endpoint"
    )
