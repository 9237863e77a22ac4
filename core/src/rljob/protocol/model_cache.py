"""Remote models (hf://, s3://) on this machine: which version the run uses, and the directory with its files.

    STORAGE/models.json      source → version (a commit, or a digest of objects), decided by the first process that
                             needs it, so that every process and every restart of the run uses the same bytes
    CACHE/complete/KEY.json  directory and sizes of the files of a version; written when the download is complete
    CACHE/locks/KEY          held by the process that downloads the version; others wait for it
    CACHE/hub, CACHE/s3      files, see rljob.protocol.hub_download and rljob.protocol.s3_download

CACHE is the directory in RLJOB_MODEL_CACHE. Without it, CACHE is ~/.cache/rljob/models, and models of the Hub are in
the cache of huggingface_hub, where other programs find them too. A version without its record is never read: its
download was interrupted and is continued.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, cast

import blake3

from rljob.api.kubernetes import Downloads
from rljob.api.model_address import HubModel, parse_address
from rljob.protocol.full_disk import FULL_DISK
from rljob.protocol.sync_path import sync_path

if TYPE_CHECKING:
    from rljob.protocol.environment import ComponentEnvironment

log = logging.getLogger(__name__)

MODEL_CACHE = "RLJOB_MODEL_CACHE"
"""Variable of any process that reads models: directory of downloaded models."""
VERSIONS_FILE = "models.json"
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".mlmodel", ".tflite"}
"""Suffixes of weights that are not downloaded if there are safetensors."""


class ModelUnavailableError(OSError):
    """A model cannot be downloaded now: no connection, a failing server, a full disk. Another attempt may succeed."""


class ModelDownload(Protocol):
    """Downloads one remote model; implemented for each scheme. Methods raise ValueError for a sentence that a user must
    act on, and :class:`ModelUnavailableError`."""

    def version(self) -> str:
        """Return the newest version of the model: characters of a file name."""
        ...

    def download(self, version: str, cache: Path | None) -> Path:
        """Download the files of a version and return their directory. ``cache``: None without RLJOB_MODEL_CACHE."""
        ...


def read_model(environment: ComponentEnvironment, name: str, download: bool = True) -> Path:
    """Return the directory of the model ``name`` of a job, and download it first if it is remote and missing.

    Args:
        environment: of the process.
        name: of the model.
        download: False: only decide the version.

    Raises:
        ValueError: a download is refused; the sentence begins with the field.
        ModelUnavailableError: a download failed and may be repeated.
    """
    i, source = next((i, model.source) for i, model in enumerate(environment.job.spec.models) if model.name == name)
    try:
        fetch(source, environment.storage, download)
    except ModelUnavailableError as error:
        raise ModelUnavailableError(f"spec.models[{i}].source: {error}") from error
    except ValueError as error:
        raise ValueError(f"spec.models[{i}].source: {error}") from error
    return environment.path(source)


def fetch(source: str, storage: Path, download: bool = True) -> None:
    """Decide the version of a remote ``source`` that the run in ``storage`` uses, and download it if it is missing.

    Args:
        source: of a model; other sources need nothing.
        storage: of the run.
        download: False: only decide the version.

    Raises:
        ValueError: the model cannot be downloaded until a user changes something.
        ModelUnavailableError: the download failed and may be repeated.
    """
    if parse_address(source) is None:
        return
    version = _decided_version(source, storage)
    if not download or _directory_of(source, version) is not None:
        return
    key = _key(source, version)
    with _room(cache_directory()), _locked(cache_directory() / "locks" / key):
        if _directory_of(source, version) is not None:  # another process has downloaded it meanwhile
            return
        directory = _download_of(source).download(version, _configured())
        files = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
        _write(_complete(key), {"source": source, "directory": str(directory), "files": files})
        log.info("%s is in %s", source, directory)


def find_model(source: str, storage: Path) -> Path | None:
    """Return the directory of a remote model that :func:`fetch` has downloaded for the run in ``storage``."""
    version = _versions(storage).get(source)
    return _directory_of(source, version) if version is not None else None


def cache_directory() -> Path:
    """Return CACHE."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _configured() or user / "rljob" / "models"


def endpoint_variables(downloads: Downloads) -> dict[str, str]:
    """Return the variables by which huggingface_hub and botocore know the addresses of a job's servers."""
    addresses = {"HF_ENDPOINT": downloads.hub_endpoint, "AWS_ENDPOINT_URL_S3": downloads.s3_endpoint}
    return {name: address for name, address in addresses.items() if address is not None}


def choose_files(names: Collection[str]) -> list[str]:
    """Return the files of a model to download: those without a directory, and of the weights only safetensors, unless
    there are none."""
    files = [name for name in sorted(names) if len(PurePosixPath(name).parts) == 1 and not name.startswith(".git")]
    weights = [name for name in files if name.endswith(".safetensors")]
    if weights:
        files = [name for name in files if PurePosixPath(name).suffix not in OTHER_WEIGHTS]
    if any(not name.startswith("consolidated") for name in weights):  # the same weights with names that nothing reads
        files = [name for name in files if not name.startswith("consolidated")]
    return files


def _decided_version(source: str, storage: Path) -> str:
    version = _versions(storage).get(source)
    if version is not None:
        return version
    with _room(storage), _locked(storage / f".{VERSIONS_FILE}.lock"):
        versions = _versions(storage)
        if source not in versions:
            versions[source] = _download_of(source).version()
            _write(storage / VERSIONS_FILE, versions)
            log.info("%s: the run uses version %s", source, versions[source])
        return versions[source]


def _download_of(source: str) -> ModelDownload:
    """Return the download of a source. Its libraries are imported here only, because that takes a second."""
    model = parse_address(source)
    if isinstance(model, HubModel):
        return cast(ModelDownload, importlib.import_module("rljob.protocol.hub_download").HubDownload(model))
    return cast(ModelDownload, importlib.import_module("rljob.protocol.s3_download").S3Download(model))


def _directory_of(source: str, version: str) -> Path | None:
    """Return the directory of a complete version; None if it is not complete, or files were removed since."""
    record = _read(_complete(_key(source, version)))
    if not record:
        return None
    directory = Path(record["directory"])
    for name, size in record["files"].items():
        try:
            if (directory / name).stat().st_size != size:
                return None
        except OSError:
            return None
    return directory


def _versions(storage: Path) -> dict[str, str]:
    return _read(storage / VERSIONS_FILE)


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return data


def _write(path: Path, data: dict[str, Any]) -> None:
    """Write a file whole or not at all, durable on return. The caller holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(json.dumps(data, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_path(path.parent)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _room(directory: Path) -> Iterator[None]:
    """Turn errors of a directory that cannot be written into sentences."""
    try:
        yield
    except ModelUnavailableError:
        raise
    except OSError as error:
        if error.errno in FULL_DISK:
            raise ModelUnavailableError(f"the model does not fit the disk of {directory}; make room there") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ValueError(f"{directory} cannot be written ({error.strerror}); set {MODEL_CACHE}") from error
        raise


def _configured() -> Path | None:
    value = os.environ.get(MODEL_CACHE)
    return Path(value).absolute() if value else None


def _complete(key: str) -> Path:
    return cache_directory() / "complete" / f"{key}.json"


def _key(source: str, version: str) -> str:
    """Return the name of the files about a version: of any source, and without a revision that may move."""
    model = parse_address(source)
    assert model is not None, "only remote models have versions"
    what = f"hf {model.repository}" if isinstance(model, HubModel) else f"s3 {model.bucket}/{model.prefix}"
    return blake3.blake3(f"{what} {version}".encode()).hexdigest()[:32]
