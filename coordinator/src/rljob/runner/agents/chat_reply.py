"""Replies of POST /v1/chat/completions: one object, or a stream of server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rljob.runner.agents.chat_request import ChatCall


@dataclass(frozen=True)
class Answer:
    """The model's answer to a call."""

    id: str
    text: str
    finish: str  # stop | length
    prompt_tokens: int
    completion_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, Any]:
        """Number of tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def completion(answer: Answer, call: ChatCall) -> bytes:
    """Return the body of a reply that is no stream."""
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    return msgspec.json.encode(_head(answer, call, "chat.completion") | {"choices": [choice], "usage": answer.usage})


def events(answer: Answer, call: ChatCall) -> Iterator[bytes]:
    """Yield the events of a stream: the answer is whole when the first one is sent."""
    head = _head(answer, call, "chat.completion.chunk") | ({"usage": None} if call.include_usage else {})
    deltas = [({"role": "assistant", "content": answer.text}, None), ({}, answer.finish)]
    for delta, finish in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        yield _event(head | {"choices": [choice]})
    if call.include_usage:
        yield _event(head | {"choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _head(answer: Answer, call: ChatCall, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": call.model}
