"""Addresses of models outside the job: hf://ORG/NAME@REVISION on the Hugging Face Hub, s3://BUCKET/PREFIX in S3.

The two patterns are also rules of the CRD, so they use the syntax that RE2 and Python share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

DEFAULT_REVISION = "main"
_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
HUB_PATTERN = rf"^hf://{_NAME}/{_NAME}(@[A-Za-z0-9_]([A-Za-z0-9_./-]*[A-Za-z0-9_])?)?$"
S3_PATTERN = r"^s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/[^/\n]+)+/?$"
HUB_FORM = "hf://ORG/NAME@REVISION"
S3_FORM = "s3://BUCKET/PREFIX"


@dataclass(frozen=True)
class HubModel:
    """A model on the Hugging Face Hub. ``revision``: a branch, tag or commit."""

    repository: str
    revision: str


@dataclass(frozen=True)
class S3Model:
    """A model whose files are the objects directly below ``prefix`` (without a slash at its end)."""

    bucket: str
    prefix: str


RemoteModel: TypeAlias = HubModel | S3Model


def parse_address(source: str) -> RemoteModel | None:
    """Return the remote model that ``source`` names; None if it is job://PATH or a path.

    Raises:
        ValueError: ``source`` begins with hf:// or s3:// and has another form.
    """
    scheme, mark, rest = source.partition("://")
    if not mark or scheme not in ("hf", "s3"):
        return None
    pattern, form = (HUB_PATTERN, HUB_FORM) if scheme == "hf" else (S3_PATTERN, S3_FORM)
    if not re.fullmatch(pattern, source):
        raise ValueError(f"{source!r} is not the address of a model; write {form}")
    if scheme == "hf":
        repository, _, revision = rest.partition("@")
        return HubModel(repository, revision or DEFAULT_REVISION)
    bucket, _, prefix = rest.partition("/")
    return S3Model(bucket, prefix.rstrip("/"))


def is_remote(source: str) -> bool:
    """Return whether a valid ``source`` is downloaded: hf:// or s3://."""
    return source.startswith(("hf://", "s3://"))
