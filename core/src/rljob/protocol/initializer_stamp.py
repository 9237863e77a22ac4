"""The content key of a job's initializer, and the stamp that the initializer writes to the storage.

The stamp (initializer.json) contains the key of the result, and `used` once the run has read the result. From then on
the result belongs to the run, and the initializer does not run again even if the manifest changes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import blake3

from rljob.api.explain import to_data
from rljob.api.field_metadata import manifest_fields, select
from rljob.api.models import RLJob, RLJobSpec
from rljob.protocol.environment import search_path

STAMP = "initializer.json"
MAX_PROGRAM_BYTES = 16 << 20


def content_key(job: RLJob) -> str:
    """Return a digest of the inputs of the initializer's result: the program, and the fields that define the run.

    Args:
        job: a resolved job.
    """
    assert job.spec.initializer is not None
    spec = select(to_data(job)["spec"], manifest_fields(RLJobSpec), ["components"])
    digest = blake3.blake3(json.dumps(spec, sort_keys=True).encode())
    for argument in job.spec.initializer.command:
        source = _source(argument)
        if source is not None:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def done(storage: Path, key: str) -> bool:
    """Return whether the storage contains the result of ``key``, or a result that the run already uses."""
    stamp = read(storage)
    return bool(stamp.get("used")) or stamp.get("key") == key


def mark_done(storage: Path, key: str) -> None:
    """Record that the initializer of ``key`` completed."""
    _write(storage, {"key": key})


def mark_used(storage: Path) -> None:
    """Record that the run uses the initializer's result. Do nothing without an initializer."""
    stamp = read(storage)
    if stamp and not stamp.get("used"):
        _write(storage, stamp | {"used": True})


def mark_unused(storage: Path) -> None:
    """Record that the run does not use the result, because the run was refused before its first step."""
    stamp = read(storage)
    if stamp:
        _write(storage, stamp | {"used": False})


def read(storage: Path) -> dict[str, Any]:
    """Return the stamp; empty if there is none."""
    try:
        stamp = json.loads((storage / STAMP).read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write(storage: Path, stamp: dict[str, Any]) -> None:
    new = storage / f".{STAMP}.new"
    with new.open("wb") as file:
        file.write(json.dumps(stamp).encode())
        file.flush()
        os.fsync(file.fileno())
    new.replace(storage / STAMP)


def _source(argument: str) -> Path | None:
    """Return the source file of a program, or the file that an argument names."""
    for script in importlib.metadata.entry_points(group="console_scripts", name=argument):
        spec = importlib.util.find_spec(script.module)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    found = shutil.which(argument, path=search_path()) or argument
    path = Path(found)
    try:
        return path if path.is_file() and path.stat().st_size <= MAX_PROGRAM_BYTES else None
    except OSError:  # not a path, for example program text
        return None
