"""The list of a model's tensors, which is sent once and named by its digest later.

A mixture of experts has 19,000 tensors: their list has 1 MB, and every update needs it for each engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import blake3
import msgspec

from rljob.protocol.shared_messages import ParameterMeta

DIGEST_BYTES = 16


def tensors_digest(parameters: Sequence[ParameterMeta]) -> str:
    """Return the digest of a list: 32 hexadecimal digits."""
    return blake3.blake3(msgspec.msgpack.encode(parameters)).hexdigest(DIGEST_BYTES)


class KnownTensors:
    """The last list that a process got. ``digest``: of the list; empty: none."""

    def __init__(self) -> None:
        self.digest = ""
        self._parameters: list[ParameterMeta] = []

    def of(self, digest: str, parameters: list[ParameterMeta]) -> list[ParameterMeta] | None:
        """Return the list that a message is about; None if it is unknown.

        Args:
            digest: of the list; empty: the message has its list, which is not kept.
            parameters: the list; empty: the receiver should know it.
        """
        if not digest:
            return parameters
        if parameters:
            self.digest, self._parameters = digest, parameters
        return self._parameters if digest == self.digest else None
