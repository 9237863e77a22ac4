"""Checks that a run keeps its data files: data.json in the job's storage records size and digest of each file."""

from __future__ import annotations

import os
from pathlib import Path

import blake3
import msgspec

NAME = "data.json"


class FileDigest(msgspec.Struct):
    """Size and digest of a file at the first start of the run."""

    bytes: int
    blake3: str


def changed(storage: Path, files: list[tuple[str, Path]]) -> list[str]:
    """Return one sentence for each file that differs from its record in ``storage``.

    Args:
        storage: the job's.
        files: each with the field of the manifest that names it.
    """
    return [
        f"{where}: {path} has changed since this run began; put the file back, or choose another --run-dir"
        for where, path in files
        if str(path) in (known := _read(storage)) and not _matches(path, known[str(path)])
    ]


def record(storage: Path, files: list[tuple[str, Path]]) -> None:
    """Record the digests of the ``files`` that ``storage`` has no record of yet.

    Raises:
        OSError: the record cannot be written.
    """
    known = _read(storage)
    new = {str(path): _digest(path) for _, path in files if str(path) not in known}
    if new:
        temporary = storage / f".{NAME}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(known | new)))
        temporary.replace(storage / NAME)


def _read(storage: Path) -> dict[str, FileDigest]:
    try:
        return msgspec.json.decode((storage / NAME).read_bytes(), type=dict[str, FileDigest])
    except OSError:
        return {}


def _matches(path: Path, known: FileDigest) -> bool:
    return path.stat().st_size == known.bytes and _digest(path) == known


def _digest(path: Path) -> FileDigest:
    return FileDigest(path.stat().st_size, blake3.blake3().update_mmap(path).hexdigest())
