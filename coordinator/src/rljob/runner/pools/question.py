"""A question to a frozen pool: the request to one of its engines, the digest by which it is found again, the reply."""

from __future__ import annotations

import math
from array import array
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


class _Logprob(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _ScoredPrompts(msgspec.Struct):
    choices: list[_Scored]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    message: _Message = msgspec.field(default_factory=_Message)
    text: str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Reply)
_logprobs_decoder = msgspec.json.Decoder(_ScoredPrompts)


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


def logprobs_body(pool: str, token_ids: bytes) -> bytes:
    """Return the body of a request for the log-probabilities of some tokens (int32); vLLM gives those of prompts."""
    fields = {"model": pool, "prompt": array("i", token_ids).tolist(), "max_tokens": 1, "prompt_logprobs": 0}
    return msgspec.json.encode(fields | {"temperature": 0.0, "stream": False})


def read_logprobs(reply: bytes, token_ids: bytes) -> list[float]:
    """Return the log-probability of each of the tokens of :func:`logprobs_body`; of the first one 0.

    Raises:
        ValueError: they are not those of the tokens. The message continues "pool NAME".
    """
    tokens = array("i", token_ids)
    try:
        given = _logprobs_decoder.decode(reply).choices[0].prompt_logprobs
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise ValueError(f"answered something else than log-probabilities: {error}") from None
    if given is None or len(given) != len(tokens):
        raise ValueError(f"answered no log-probabilities of the {len(tokens)} tokens")
    found = [0.0]
    for token, known in zip(tokens[1:], given[1:], strict=True):
        logprob = None if known is None else known.get(str(token))
        if logprob is None or not math.isfinite(logprob.logprob):
            raise ValueError(f"answered no finite log-probability of token {token}")
        found.append(logprob.logprob)
    return found


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
