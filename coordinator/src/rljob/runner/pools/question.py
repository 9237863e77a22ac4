"""A question to a frozen pool: the request to one of its engines, the digest by which it is found again, the reply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import msgspec

from rljob.runner.call_arguments import checked_max_tokens, checked_stop
from rljob.runner.context import TrajectoryError
from rljob.runner.prompt_content import Messages

DIGEST_BYTES = 16
MAX_BODY_BYTES = 15 << 20
"""Below what the listener of an engine takes."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    message: _Message = msgspec.field(default_factory=_Message)
    text: str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Reply)


@dataclass(frozen=True)
class Question:
    """What a loop asks a frozen pool. ``content``: messages of a chat, or a text that the model continues."""

    pool: str
    content: str | Messages
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]

    @property
    def path(self) -> str:
        """Path of the request."""
        return "v1/completions" if isinstance(self.content, str) else "v1/chat/completions"

    @property
    def digest(self) -> str:
        """Of everything but the seed: 32 hex digits."""
        return blake3.blake3(msgspec.json.encode(self._fields, order="deterministic")).hexdigest(DIGEST_BYTES)

    def body(self, seed: int) -> bytes:
        """Return the body of the request."""
        return msgspec.json.encode(self._fields | {"seed": seed, "stream": False})

    @property
    def _fields(self) -> dict[str, Any]:
        name = "prompt" if isinstance(self.content, str) else "messages"
        return {
            "model": self.pool,
            name: self.content,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": list(self.stop),
        }


def make_question(
    pool: str,
    content: str | Messages,
    max_tokens: int,
    temperature: float,
    top_p: float,
    stop: Sequence[str],
) -> Question:
    """Return a question.

    Raises:
        TrajectoryError: it is malformed.
    """
    asks = f"the loop asks pool {pool}"
    is_chat = isinstance(content, list) and all(isinstance(each, dict) and "role" in each for each in content)
    if not content or not (isinstance(content, str) or is_chat):
        raise TrajectoryError(f"{asks} something else than a text or a list of messages with roles")
    most, stop = checked_max_tokens(asks, max_tokens), checked_stop(asks, stop)
    numbers = all(isinstance(each, int | float) and math.isfinite(each) for each in (temperature, top_p))
    if not (numbers and temperature >= 0 and 0 < top_p <= 1):
        raise TrajectoryError(
            f"{asks} with temperature {temperature!r} and top_p {top_p!r}; give a temperature of at least 0, and a "
            "top_p above 0 and at most 1"
        )
    question = Question(pool, content, most, float(temperature), float(top_p), tuple(stop))
    try:
        size = len(question.body(0))
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise TrajectoryError(f"{asks} something that cannot be sent: {error}") from None
    if size > MAX_BODY_BYTES:
        raise TrajectoryError(f"{asks} with {size:,} bytes; at most {MAX_BODY_BYTES:,} are sent")
    return question


def read_reply(reply: bytes) -> tuple[str, str]:
    """Return the text of a reply and its finish: stop | length.

    Raises:
        ValueError: it is no complete answer. The message continues "pool NAME".
    """
    try:
        choice = _decoder.decode(reply).choices[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise ValueError(f"answered something else than a completion: {error}") from None
    text = choice.text if choice.message.content is None else choice.message.content
    if text is None:
        raise ValueError("answered without a text")
    if choice.finish_reason not in ("stop", "length"):
        raise ValueError(f"did not complete its answer (finish_reason {choice.finish_reason!r})")
    return text.encode(errors="replace").decode(), choice.finish_reason
