"""The content of a row's prompt: plain text, or chat messages that are not rendered yet."""

from __future__ import annotations

from typing import Any, TypeAlias

from rljob.api.tasks import Task
from rljob.api.templates import fill, kind_of, value_of

Messages: TypeAlias = list[dict[str, Any]]
OBSERVATION = "observation"
"""Column of a task with an environment: the observation."""


def content_of(task: Task, row: dict[str, Any]) -> str | Messages:
    """Return the prompt content of ``row``, by the prompt, messages or messagesColumn of a resolved task.

    Raises:
        ValueError: the row lacks a column, or the column holds another type; the message names the column.
    """
    if task.messages is not None:
        return [{"role": message.role, "content": fill(message.content, row)} for message in task.messages]
    if task.messages_column is not None:
        return _chat(row, task.messages_column)
    assert task.prompt is not None, "a resolved task has prompt, messages or messagesColumn"
    return fill(task.prompt, row)


def identity(content: str | Messages) -> str:
    """Return a text that is equal for equal prompts. It does not depend on the model's chat template."""
    if isinstance(content, str):
        return content
    return "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in content)


def _chat(row: dict[str, Any], column: str) -> Messages:
    messages = value_of(row, column)
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else "text" if isinstance(messages, str) else kind_of(messages)
        raise ValueError(f"column {column!r} holds {what}; it must hold a chat: a list of {{role, content}}")
    for i, message in enumerate(messages):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"column {column!r}, message {i + 1}: must be a mapping of role and content, both text")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"column {column!r}: the last message is the assistant's; end the chat with what to answer")
    return messages
