"""Contexts of turns that are sent as what they add to a context that the receiver has.

The context of a turn is the context and the answer of the turn before, and the tokens added after them. So every token
of a trajectory travels, is stored and is hashed once, however many turns it has.
"""

from __future__ import annotations

from collections.abc import Iterable

import blake3

from rljob.protocol.messages import DIGEST_BYTES, Generate, context_digest

TOKEN_BYTES = 4
"""Bytes of a token id."""


class GrowingDigest:
    """The digest of token ids that others are appended to: each token is hashed once, and only if a digest of it or of
    a later one is needed."""

    def __init__(self) -> None:
        self._hasher: blake3.blake3 | None = None
        self._pending: list[bytes] = []

    def append(self, token_ids: bytes) -> None:
        """Append token ids (int32 bytes)."""
        self._pending.append(token_ids)

    def digest(self) -> str:
        """Return :func:`rljob.protocol.messages.context_digest` of all token ids so far."""
        pending, self._pending = self._pending, []
        if self._hasher is None:
            self._hasher = blake3.blake3()
        for token_ids in pending:
            self._hasher.update(token_ids)
        return self._hasher.hexdigest(DIGEST_BYTES)


class KeptContexts:
    """The contexts and answers that an agent keeps, so that the requests of later turns only bring what they add.

    A context is here from the end of a request to the next request of its sample. Without room, those that have been
    here longest are dropped, and their requests are sent whole.

    Args:
        max_bytes: of all contexts together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, bytes] = {}  # sample → int32, oldest first
        self._bytes = 0

    def whole(self, request: Generate) -> Generate | None:
        """Return a request with all its tokens and their digest; its sample's context is kept no more.

        Returns:
            None if the prefix of the request is not here, or if all tokens together are not those that it is about.
        """
        kept = self._remove(request.request_id.sample)
        prefix = kept[: TOKEN_BYTES * request.prefix_tokens]
        if len(prefix) != TOKEN_BYTES * request.prefix_tokens:
            return None
        context = prefix + request.token_ids if prefix else request.token_ids
        digest = context_digest(context)
        if request.prefix_tokens and digest != request.context:
            return None
        return Generate(request.request_id, context, request.sampling, context=digest)

    def keep(self, sample: str, token_ids: bytes) -> None:
        """Keep the context and the answer of the last request of a sample (int32)."""
        self._remove(sample)
        self._kept[sample] = token_ids
        self._bytes += len(token_ids)
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def forget(self, samples: Iterable[str]) -> None:
        """Drop the contexts of samples that ended or continue elsewhere."""
        for sample in samples:
            self._remove(sample)

    def clear(self) -> None:
        """Drop all contexts."""
        self._kept.clear()
        self._bytes = 0

    def _remove(self, sample: str) -> bytes:
        kept = self._kept.pop(sample, b"")
        self._bytes -= len(kept)
        return kept
