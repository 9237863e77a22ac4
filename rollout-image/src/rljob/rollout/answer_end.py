"""Finds the token that ends an answer: stop tokens and stop strings, after the minimum length.

Adapters and servers of engines use it token by token. What it finds depends on the tokens of the answer alone. So an
answer that one engine began and another one continues ends at the same token as an uninterrupted one, also if a stop
string straddles the seam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rljob.protocol.agent_protocol import SamplingParams
from rljob.protocol.stop_strings import find_stop


@cache
def load_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of the model in a directory."""
    return Tokenizer.from_file(f"{model}/tokenizer.json")


class AnswerEnd:
    """The end of one answer.

    Args:
        sampling: of the request.
        prompt: token ids of the request; the last ``sampling.answered`` of them are tokens of the answer.
        tokenizer: returns the model's tokenizer. It is called if the request has stop strings.
    """

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], tokenizer: Callable[[], Tokenizer]) -> None:
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self._text = _TextEnd(sampling.stop, tokenizer()) if sampling.stop else None
        for token in prompt[len(prompt) - sampling.answered :]:
            self.is_at(token)

    def is_at(self, token: int) -> bool:
        """Take the next token of the answer; return whether the answer ends with it."""
        self._count += 1
        stops = token in self._stop_token_ids
        if self._text is not None:
            stops = self._text.completes_stop(token) or stops
        return stops and self._count > self._min_tokens


class _TextEnd:
    """Looks for stop strings in the text of an answer without special tokens."""

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stops = stops
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._longest = max(map(len, stops))
        self._last = ""  # part of the text in which a stop string may begin

    def completes_stop(self, token: int) -> bool:
        """Take the next token; return whether its text completes a stop string."""
        text = self._last + self._decode(token)
        found = find_stop(text, len(self._last), self._stops)
        self._last = text[max(0, len(text) - self._longest + 1) :]
        return found is not None

    def _decode(self, token: int) -> str:
        """Return the text that the token adds; empty until a character is complete."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # noqa: BLE001 tokenizers raises bare Exception where bytes are no text: begin after them
            self._stream = DecodeStream(skip_special_tokens=True)
            return ""
