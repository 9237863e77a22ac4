"""Contexts of turns that are sent as what they add to a context that the receiver has.

The context of a turn is the context and the answer of the turn before, and the tokens added after them. So every token
of a trajectory travels, is stored and is hashed once, however many turns it has.
"""

from __future__ import annotations

from collections.abc import Iterable

import blake3

from rljob.protocol.agent_protocol import Generate, RequestId
from rljob.protocol.branches import before, context_name

TOKEN_BYTES = 4
"""Bytes of a token id."""
DIGEST_BYTES = 16
"""Length of context_digest; its text has twice as many characters."""


def context_digest(token_ids: bytes) -> str:
    """Return the digest of the token ids that a completion is generated from: 32 hex digits."""
    return blake3.blake3(token_ids).hexdigest(DIGEST_BYTES)


class GrowingDigest:
    """The digest of token ids that others are appended to: each token is hashed once, and only if a digest of it or of
    a later one is needed."""

    __slots__ = ("_digest", "_hasher", "_pending")

    def __init__(self) -> None:
        self._hasher: blake3.blake3 | None = None
        self._pending: list[bytes] = []
        self._digest = ""  # of all token ids; empty: it is not known

    def copy(self) -> GrowingDigest:
        """Return a digest of the same token ids, which grows on its own."""
        result = GrowingDigest()
        result._hasher = None if self._hasher is None else self._hasher.copy()
        result._pending, result._digest = [*self._pending], self._digest
        return result

    def append(self, token_ids: bytes) -> None:
        """Append token ids (int32 bytes)."""
        self._pending.append(token_ids)
        self._digest = ""

    def digest(self) -> str:
        """Return :func:`context_digest` of all token ids so far."""
        if not self._digest:
            if self._hasher is None:
                self._hasher = blake3.blake3()
            for token_ids in self._pending:
                self._hasher.update(token_ids)
            self._pending.clear()
            self._digest = self._hasher.hexdigest(DIGEST_BYTES)
        return self._digest


class KeptContexts:
    """The contexts and answers that an agent keeps, so that the requests of later turns only bring what they add.

    A context is here from a request on; with its end the answer is too. So branches can be made from it while the next
    turn is generated. Without room, those that have been here longest are dropped, and their requests are sent whole.

    Args:
        max_bytes: of all contexts together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, bytes] = {}  # name of the context → int32, oldest first
        self._bytes = 0

    def whole(self, request: Generate) -> Generate | None:
        """Return a request with all its tokens and their digest; they are kept from now on. The first request of a
        branch continues the context of the branch that it was made from.

        Returns:
            None if the prefix of the request is not here, or if all tokens together are not those that it is about.
        """
        kept, request_id = self._remove(_name(request.request_id)), request.request_id
        if not kept and request.prefix_tokens and request_id.branch:
            kept = self._kept_before(request_id)
        prefix = kept[: TOKEN_BYTES * request.prefix_tokens]
        if len(prefix) != TOKEN_BYTES * request.prefix_tokens:
            return None
        context = prefix + request.token_ids if prefix else request.token_ids
        digest = context_digest(context)
        if request.prefix_tokens and digest != request.context:
            return None
        self._keep(_name(request_id), context)
        return Generate(request_id, context, request.sampling, context=digest)

    def keep(self, request_id: RequestId, token_ids: bytes) -> None:
        """Keep the context and the answer of the last request of a branch (int32)."""
        self._keep(_name(request_id), token_ids)

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts of branches that ended or continue elsewhere."""
        for name in names:
            self._remove(name)

    def clear(self) -> None:
        """Drop all contexts."""
        self._kept.clear()
        self._bytes = 0

    def _keep(self, name: str, token_ids: bytes) -> None:
        self._remove(name)
        self._kept[name] = token_ids
        self._bytes += len(token_ids)
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def _kept_before(self, request_id: RequestId) -> bytes:
        """Return the context of the turn before the first turn of a branch; empty if it is not here."""
        earlier = before((request_id.turn, request_id.branch))
        return b"" if earlier is None else self._kept.get(context_name(request_id.sample, earlier[1]), b"")

    def _remove(self, name: str) -> bytes:
        kept = self._kept.pop(name, b"")
        self._bytes -= len(kept)
        return kept


def _name(request_id: RequestId) -> str:
    return context_name(request_id.sample, request_id.branch)
