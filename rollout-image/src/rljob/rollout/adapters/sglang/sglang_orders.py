"""What rljob's client tells rljob's receiver inside SGLang, beside the fields of SGLang's own routes.

Joining is SGLang's /init_weights_update_group, and an update is its /update_weights_from_distributed. Both have one
field of free text, ``group_name``: it holds one of these types as JSON.
"""

from __future__ import annotations

import msgspec


class SglangGroup(msgspec.Struct):
    """A weight group to join; the route's own fields have its address, its port, its size and the transport.

    Args:
        group: name and nonce of the group, see PrepareWeights.
        bucket_bytes: of one broadcast.
        timeout_seconds: of joining.
    """

    group: str
    bucket_bytes: int
    timeout_seconds: float


class SglangRound(msgspec.Struct):
    """An update in the group that was joined; the route's own fields have the tensors and the version.

    Args:
        timeout_seconds: of receiving all tensors.
    """

    timeout_seconds: float


def as_text(order: SglangGroup | SglangRound) -> str:
    """Return an order as JSON, for ``group_name``."""
    return msgspec.json.encode(order).decode()
