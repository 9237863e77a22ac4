"""Scores of a reward that says that it is deterministic, by the content of their samples.

The members of a group often have equal answers: the reward then scores one of them. A cache lives as long as its
runner.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from rljob.protocol.score_messages import Score, ScoreItem

ENTRIES = 10_000
MAX_METRICS = 64
"""A score with more metrics is not kept."""

_encoder = msgspec.json.Encoder(order="deterministic")


class ScoreCache:
    """The last scores that were used, at most :data:`ENTRIES`. Empty until the reward says that it is deterministic."""

    def __init__(self) -> None:
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    def get(self, item: ScoreItem) -> Score | None:
        """Return the score of a sample with the same content."""
        if not self._scores or (key := _key(item)) not in self._scores:
            return None
        self._scores.move_to_end(key)
        return msgspec.structs.replace(self._scores[key], sample=item.sample)

    def put(self, item: ScoreItem, score: Score) -> None:
        """Keep a score. An error is not kept, because it may be of the service and not of the sample."""
        if score.error or len(score.metrics) > MAX_METRICS:
            return
        self._scores[_key(item)] = score
        if len(self._scores) > ENTRIES:
            self._scores.popitem(last=False)


def _key(item: ScoreItem) -> bytes:
    """Return a digest of all that a reward sees: everything but the id of the sample. Empty: it cannot be encoded."""
    try:
        return hashlib.sha256(_encoder.encode(msgspec.structs.replace(item, sample=""))).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""
