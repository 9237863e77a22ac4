"""Downloads a model from S3 with s3fs. Credentials and address are those of botocore: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY or another source of credentials, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import blake3
import msgspec
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from s3fs import S3FileSystem

from rljob.api.model_address import S3Model
from rljob.protocol.full_disk import FULL_DISK
from rljob.protocol.model_cache import ModelUnavailableError, cache_directory, choose_files
from rljob.protocol.sync_path import sync_path

log = logging.getLogger(__name__)

CREDENTIALS_REMEDY = (
    "give credentials that may read it: the variables of AWS for rljob run, in a cluster the Secret in "
    "spec.downloads.secret"
)


class S3Download:
    """See :class:`rljob.protocol.model_cache.ModelDownload`. A version is a digest of names, sizes and ETags."""

    def __init__(self, model: S3Model) -> None:
        self._path = f"{model.bucket}/{model.prefix}"
        self._files = S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def version(self) -> str:
        """Return the digest of the objects."""
        with self._explained_errors():
            return _digest(self._path, self._objects())

    def download(self, version: str, cache: Path | None) -> Path:
        """Download the objects of a version into a new directory, which gets its name when it is complete."""
        target = (cache or cache_directory()) / "s3" / version
        temporary = target.with_name(f"{version}.tmp-{secrets.token_hex(4)}")
        with self._explained_errors(target), _removed_on_failure(temporary):
            for left in target.parent.glob(f"{version}*"):  # of an interrupted download; the caller holds the lock
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
            objects = self._objects(version)
            size = sum(each["size"] for each in objects.values())
            free = shutil.disk_usage(temporary).free
            if size > free:
                raise ModelUnavailableError(
                    f"its {size / 1e9:.1f} GB do not fit the disk of {target} with {free / 1e9:.1f} GB free; make room "
                    "there"
                )
            log.info("downloading %d objects of s3://%s (%.2f GB)", len(objects), self._path, size / 1e9)
            local = [str(temporary / name) for name in objects]
            self._files.get([each["name"] for each in objects.values()], local)
            self._objects(version)  # an object that was replaced meanwhile
            for name, each in objects.items():
                path = temporary / name
                if path.stat().st_size != each["size"]:
                    raise ModelUnavailableError(f"s3://{self._path}/{name} was not downloaded completely; try again")
                sync_path(path)
            temporary.rename(target)
            return target

    def _objects(self, version: str = "") -> dict[str, dict[str, Any]]:
        """Return name → description of the objects to download; with ``version``, check that they are of it."""
        found = {
            PurePosixPath(each["name"]).name: each
            for each in self._files.ls(self._path, detail=True, refresh=True)
            if each["type"] == "file" and each["name"].rstrip("/") != self._path
        }
        chosen = {name: found[name] for name in choose_files(found)}
        if not chosen:
            raise ValueError(f"there are no objects below s3://{self._path}/; correct the prefix")
        if version and _digest(self._path, chosen) != version:
            raise ValueError(
                f"the objects below s3://{self._path}/ have changed since the run started; restore them, or start "
                "another run"
            )
        return chosen

    @contextmanager
    def _explained_errors(self, target: Path | None = None) -> Iterator[None]:
        """Turn errors of s3fs, which raises errors of Python for most responses, into sentences."""
        try:
            yield
        except ModelUnavailableError:
            raise
        except (BotoCoreError, ClientError) as error:
            if isinstance(error, NoCredentialsError | PartialCredentialsError):
                raise ValueError(f"S3 refuses access to s3://{self._path}/ ({error}); {CREDENTIALS_REMEDY}") from error
            raise self._unreachable(error) from error
        except OSError as error:
            if error.filename is not None:  # of a file on this machine
                raise
            raise self._explained(error, target) from error

    def _explained(self, error: OSError, target: Path | None) -> Exception:
        if isinstance(error, FileNotFoundError):
            return ValueError(f"there is no bucket or prefix s3://{self._path}/; correct it")
        if isinstance(error, PermissionError):
            return ValueError(f"S3 refuses access to s3://{self._path}/ ({error}); {CREDENTIALS_REMEDY}")
        if error.errno in FULL_DISK:
            return ModelUnavailableError(f"the model does not fit the disk of {target}; make room there")
        return self._unreachable(error)

    def _unreachable(self, error: Exception) -> ModelUnavailableError:
        address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
        return ModelUnavailableError(
            f"s3://{self._path}/ cannot be read from {address} ({error}); check the network and "
            "spec.downloads.s3Endpoint"
        )


@contextmanager
def _removed_on_failure(directory: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # after success it has another name


def _digest(path: str, objects: dict[str, dict[str, Any]]) -> str:
    rows: list[Any] = [path, *([name, each["size"], each.get("ETag", "")] for name, each in sorted(objects.items()))]
    return blake3.blake3(msgspec.json.encode(rows)).hexdigest()[:40]
