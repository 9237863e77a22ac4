"""Copies of checkpoints outside the job's storage (``spec.checkpoints.uri``)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from rljob.api.model_address import S3Model, parse_address
from rljob.api.models import RLJobSpec
from rljob.protocol.checkpoint_files import directory_name

if TYPE_CHECKING:
    from rljob.protocol.s3_checkpoints import S3Checkpoints


class CheckpointCopy(NamedTuple):
    """A copy of the checkpoint of ``step`` of the run with the id ``run``. ``digest``: first digits of that of its
    record. ``written``: time of its record, to compare; empty while the copy is not complete. ``files``: path in the
    checkpoint."""

    run: str
    step: int
    digest: str
    written: str
    files: list[str]

    @property
    def name(self) -> str:
        """Path of its directory, from the address of the copies."""
        return f"{self.run}/{directory_name(self.step)}-{self.digest}"

    def is_of(self, digest: str) -> bool:
        """Return whether it is a copy of the checkpoint whose record has ``digest``."""
        return digest.startswith(self.digest)


class CopyError(OSError):
    """A copy cannot be written, read or listed. Another attempt may succeed."""


class CopyRefusedError(CopyError):
    """The same, and a user must act before another attempt can succeed."""


def open_copies(spec: RLJobSpec, run: str = "") -> S3Checkpoints | None:
    """Return the copies of a job's checkpoints, if it has them; ``run`` as in :func:`open_address`."""
    uri = spec.checkpoints.uri
    return None if uri is None else open_address(uri, spec.downloads.s3_endpoint, run)


def open_address(uri: str, endpoint: str | None, run: str = "") -> S3Checkpoints:
    """Return the copies at ``uri``. s3fs is imported here only, because that takes a second.

    Args:
        uri: ``spec.checkpoints.uri``.
        endpoint: ``spec.downloads.s3Endpoint``; None: the address of botocore.
        run: id of the run whose copies they are; empty: those of all runs, to read.
    """
    address = parse_address(uri)
    assert isinstance(address, S3Model), "its type admits s3:// only"
    module = importlib.import_module("rljob.protocol.s3_checkpoints")
    found: S3Checkpoints = module.S3Checkpoints(address, endpoint, run)
    return found
