"""Downloads a model from S3; see :mod:`rljob.protocol.s3_access` for credentials and address."""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import blake3
import msgspec

from rljob.api.model_address import S3Model
from rljob.protocol.model_cache import ModelUnavailableError, cache_directory, choose_files
from rljob.protocol.s3_access import explained_errors, open_s3, removed_on_failure
from rljob.protocol.sync_path import sync_path

log = logging.getLogger(__name__)


class S3Download:
    """See :class:`rljob.protocol.model_cache.ModelDownload`. A version is a digest of names, sizes and ETags."""

    def __init__(self, model: S3Model) -> None:
        self._path = f"{model.bucket}/{model.prefix}"
        self._files = open_s3()

    def version(self) -> str:
        """Return the digest of the objects."""
        with explained_errors(self._path):
            return _digest(self._path, self._objects())

    def download(self, version: str, cache: Path | None) -> Path:
        """Download the objects of a version into a new directory, which gets its name when it is complete."""
        target = (cache or cache_directory()) / "s3" / version
        temporary = target.with_name(f"{version}.tmp-{secrets.token_hex(4)}")
        with explained_errors(self._path, target), removed_on_failure(temporary):
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


def _digest(path: str, objects: dict[str, dict[str, Any]]) -> str:
    rows: list[Any] = [path, *([name, each["size"], each.get("ETag", "")] for name, each in sorted(objects.items()))]
    return blake3.blake3(msgspec.json.encode(rows)).hexdigest()[:40]
