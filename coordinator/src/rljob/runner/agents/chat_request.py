"""Requests of POST /v1/chat/completions: which fields are read, which are ignored, and which are refused by name.

A request may say where its answer ends (`max_tokens`, `stop`). How tokens are drawn is set by the task's `sampling`:
`temperature`, `top_p` and the like are ignored, because the trainer must know the distribution of every token. A frozen
pool gets the first two. A field that would change the meaning of the answer is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from rljob.runner.agents.refused_call import RefusedCallError
from rljob.runner.call_arguments import MOST_STOP_CHARACTERS, MOST_STOP_STRINGS
from rljob.runner.prompt_content import Messages

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of a message → role in the chat template."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Fields that are refused, except with null and these values, which change nothing."""
REFUSED_IN_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "audio")


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    # refused, see NEUTRAL
    n: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    # how tokens are drawn: ignored, except for the first two if a frozen pool is asked
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    # ignored: they do not concern the answer
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


@dataclass(frozen=True)
class CallMessage:
    """A message of a chat."""

    role: str  # system | user | assistant
    text: str

    def same(self, other: CallMessage) -> bool:
        """Whether a program means the same message: programs remove white space around answers."""
        return self.role == other.role and self.text.strip() == other.text.strip()


@dataclass(frozen=True)
class ChatCall:
    """A valid request."""

    messages: list[CallMessage]
    max_tokens: int | None
    stop: list[str]
    stream: bool
    include_usage: bool  # in a stream
    model: str
    temperature: float = 1.0  # of a frozen pool, as the next
    top_p: float = 1.0


_decoder = msgspec.json.Decoder(ChatRequest)


def read_call(body: bytes) -> ChatCall:
    """Return the call that a request makes.

    Raises:
        RefusedCallError: the body is no valid request, or a field is not supported.
    """
    try:
        request = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedCallError(
            f"the body is no request of chat completions: {error}", param=_param(str(error))
        ) from None
    for name, neutral in NEUTRAL.items():
        if getattr(request, name) is not None and getattr(request, name) not in neutral:
            raise RefusedCallError(f"{name} is not supported here; remove it", param=name)
    options = request.stream_options or {}
    return ChatCall(
        messages=_messages(request.messages),
        max_tokens=_max_tokens(request),
        stop=_stop(request.stop),
        stream=bool(request.stream),
        include_usage=options.get("include_usage") is True,
        model=request.model or "policy",
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
    )


def rendered(messages: list[CallMessage]) -> Messages:
    """Return messages as the chat template reads them."""
    return [{"role": message.role, "content": message.text} for message in messages]


def _param(error: str) -> str | None:
    """Return the field that an error of the decoder names."""
    found = re.search(r"unknown field `([^`]*)`|at `\$\.([^`]*)`|required field `([^`]*)`", error)
    return next((group for group in found.groups() if group), None) if found else None


def _max_tokens(request: ChatRequest) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise RefusedCallError(f"{name} is {value}; it must be at least 1", param=name)
        if value is not None:
            return int(value)
    return None


def _stop(stop: str | list[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MOST_STOP_STRINGS:
        raise RefusedCallError(f"stop has {len(strings)} strings; give at most {MOST_STOP_STRINGS}", param="stop")
    for text in strings:
        if not 1 <= len(text) <= MOST_STOP_CHARACTERS:
            raise RefusedCallError(
                f"a string of stop has {len(text)} characters; give 1 to {MOST_STOP_CHARACTERS}", param="stop"
            )
    return strings


def _messages(given: list[dict[str, Any]]) -> list[CallMessage]:
    if not given:
        raise RefusedCallError("messages is empty; give at least one", param="messages")
    messages = [_message(i, message) for i, message in enumerate(given)]
    if messages[-1].role == "assistant":
        raise RefusedCallError(
            "the last of messages is the assistant's, and an answer is not continued; end with the message that the "
            "model answers",
            param="messages",
        )
    return messages


def _message(i: int, given: dict[str, Any]) -> CallMessage:
    role = given.get("role")
    if role not in ROLES:
        raise RefusedCallError(
            f"messages[{i}].role is {role!r}; it must be one of {', '.join(ROLES)}", param=f"messages[{i}].role"
        )
    for name in REFUSED_IN_MESSAGES:
        if given.get(name):
            raise RefusedCallError(
                f"messages[{i}].{name} is not supported here; remove it", param=f"messages[{i}].{name}"
            )
    return CallMessage(ROLES[role], _text(f"messages[{i}].content", given.get("content")))


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RefusedCallError(f"{where} is neither text nor a list of parts", param=where)
    texts = []
    for j, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RefusedCallError(f"{where}[{j}] is not of type text, and other parts are not supported", param=where)
        texts.append(part["text"])
    return "\n".join(texts)
