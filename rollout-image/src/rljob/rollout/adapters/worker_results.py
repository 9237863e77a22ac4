"""What the workers of an engine answer to a call of their weight receivers, and what they answer together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class WorkerResult(msgspec.Struct):
    """What a worker answers: the digest of what it received, and the error that it caught, if any."""

    digest: str
    error: str


def require_success(results: Sequence[WorkerResult]) -> None:
    """Check that no worker failed.

    Raises:
        RuntimeError: a worker failed; the message has the error of each.
    """
    if failed := [i for i, result in enumerate(results) if result.error]:
        errors = (f"worker {i} of {len(results)}: {results[i].error}" for i in failed)
        raise RuntimeError("; ".join(errors) if len(results) > 1 else results[0].error)


def agreed_digest(results: Sequence[WorkerResult]) -> str:
    """Return the digest that all workers received.

    Raises:
        RuntimeError: a worker failed, or the digests differ.
    """
    require_success(results)
    digests = {result.digest for result in results}
    if len(digests) != 1:
        raise RuntimeError("the engine's workers received different weights")
    return digests.pop()
