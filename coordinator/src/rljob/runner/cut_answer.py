"""The text of an answer, as rewards, environments and users get it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rljob.api.tasks import Sampling
from rljob.protocol.stop_strings import find_stop

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character yet."""


class Decoder(Protocol):
    """Decodes text, as :class:`rljob.runner.tokenizer.TextCodec` does."""

    def decode(self, token_ids: bytes) -> str:
        """Return the text of token ids, without special tokens."""


def answer_text(
    decoder: Decoder, sampling: Sampling, token_ids: bytes, finish: str, more_stop: Sequence[str] = ()
) -> str:
    """Return the text of an answer without special tokens. If a stop string ended it, the text is cut before the stop
    string, or after it with sampling.includeStop: the last token may have text beyond.

    Args:
        decoder: the policy's tokenizer.
        sampling: of the task.
        token_ids: of the answer (int32 bytes).
        finish: stop | length.
        more_stop: stop strings of this answer, beside those of the task.
    """
    text = decoder.decode(token_ids)
    stop = [*sampling.stop, *more_stop]
    if finish != "stop" or not stop:
        return text
    # Only the last token ends an answer: earlier stop strings are within the first minTokens tokens.
    seen = len(decoder.decode(token_ids[:-4]).rstrip(REPLACEMENT))
    found = find_stop(text, seen, stop)
    if found is None:
        return text
    start, end = found
    return text[:end] if sampling.include_stop else text[:start]
