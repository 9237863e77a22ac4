"""Compares the version of the API server with the supported versions of Kubernetes.

The operator also works on other versions, as far as they have the types and fields that it uses. It reports that it was
never tested there.
"""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec
from prometheus_client import Gauge

from rljob.kube.errors import ApiError
from rljob.operator.operator_client import OperatorClient

log = logging.getLogger(__name__)

OLDEST, NEWEST = (1, 33), (1, 37)
"""Minor versions on whose API servers all rendered objects are validated; docs/operations/versions.md."""
CHECK_SECONDS = 3600.0
"""A cluster is upgraded while the operator runs."""
RETRY_SECONDS = 30.0


class _Version(msgspec.Struct, rename="camel"):
    """Answer of /version."""

    major: str
    minor: str
    git_version: str


def text(version: tuple[int, int]) -> str:
    """Return a minor version as it is written: 1.33."""
    return f"{version[0]}.{version[1]}"


def read_version(answer: bytes) -> tuple[str, tuple[int, int]]:
    """Return the full version, such as v1.33.5-gke.1201, and its minor version, from an answer of /version.

    Raises:
        ValueError: it is not such an answer.
    """
    found = msgspec.json.decode(answer, type=_Version)
    major, minor = (re.match(r"\d+", part) for part in (found.major, found.minor))  # a cloud may append a plus sign
    if major is None or minor is None:
        raise ValueError(f"the API server reports the version {found.major!r}.{found.minor!r}")
    return found.git_version, (int(major[0]), int(minor[0]))


def problem(name: str, version: tuple[int, int]) -> str:
    """Return a sentence if the version is not supported; otherwise an empty string."""
    if OLDEST <= version <= NEWEST:
        return ""
    remedy = "upgrade the cluster" if version < OLDEST else "upgrade rljob"
    return (
        f"Kubernetes {name} is not supported by this version of rljob, which supports {text(OLDEST)} to "
        f"{text(NEWEST)}: {remedy}"
    )


async def check_version(client: OperatorClient, supported: Gauge) -> None:
    """Read the version of the API server now and once an hour; log and export whether it is supported. Never returns.

    Args:
        client: of the operator.
        supported: metric with the label ``version``.
    """
    known = ""
    while True:
        try:
            name, version = read_version(await client.version())
        except (ApiError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.warning("the version of the API server is not known: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if name != known:
            known, sentence = name, problem(name, version)
            supported.clear()
            supported.labels(name).set(0 if sentence else 1)
            if sentence:
                log.warning("%s", sentence)
            else:
                log.info("Kubernetes %s is supported", name)
        await asyncio.sleep(CHECK_SECONDS)
