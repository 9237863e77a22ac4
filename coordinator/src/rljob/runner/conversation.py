"""The text between two answers of the model: the end of the answer's message, and the next observation.

With `messages`, this text is what the model's chat template writes between the content of the assistant's message and
that of its next message. It is found by rendering a short chat in which a marker takes the place of the answer: the
answer itself is never rendered or encoded again, and the prompt before it is never rendered again. The template may
write other text around earlier messages of a longer history; the tokens that the model saw stay as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any

from rljob.api.tasks import Task
from rljob.api.templates import fill
from rljob.runner.chat import ChatTemplate
from rljob.runner.prompt_content import OBSERVATION, Messages, content_of
from rljob.runner.prompts import Encoder

MARKER = "rljob-answer-4f1c"


def text_after_answer(chat: ChatTemplate, history: Messages, following: Messages) -> str:
    """Return what the chat template writes after the content of an answer, up to the next answer.

    Args:
        chat: the policy's chat template.
        history: messages before the answer.
        following: messages after it.

    Raises:
        ValueError: the chat template rejects the messages, or does not keep an answer as it is.
    """
    rendered = chat.render([*history, {"role": "assistant", "content": MARKER}, *following])
    _, found, after = rendered.partition(MARKER)
    if not found or MARKER in after:
        raise ValueError("the model's chat template does not write the content of an answer exactly once")
    return after


def tokens_after_answer(encoder: Encoder, stop_token_ids: Collection[int], text: str, answer: bytes) -> bytes:
    """Return the token ids (int32 bytes) of the text after an answer: all that the model did not write itself.

    If the answer ends with the token that also begins the text, the text's own is left out. An answer that was cut at
    its maximum length has no such token and gets the text's.

    Args:
        encoder: the policy's tokenizer.
        stop_token_ids: tokens that end an answer.
        text: after the content of the answer.
        answer: token ids of the answer (int32 bytes).
    """
    tokens = encoder.encode(text, special=False)
    last = array("i", answer[-4:])
    if last and last[0] in stop_token_ids and tokens[:4] == answer[-4:]:
        return tokens[4:]
    return tokens


class Conversation:
    """Encodes the observations of a task with an environment.

    Args:
        task: with an environment.
        encoder: the policy's tokenizer.
        chat: the policy's chat template; None if the task has a plain prompt.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, task: Task, encoder: Encoder, chat: ChatTemplate | None, stop_token_ids: Sequence[int]) -> None:
        assert task.environment is not None, "the task has an environment"
        self._task = task
        self._template = task.environment.observation
        self._encoder = encoder
        self._chat = chat if task.prompt is None else None
        self._stop = frozenset(stop_token_ids)

    def follow(self, row: dict[str, Any], observation: str, answer: bytes) -> bytes:
        """Return the token ids (int32 bytes) that follow an answer; see :func:`tokens_after_answer`.

        Args:
            row: of the task's data.
            observation: the environment's text.
            answer: token ids of the answer (int32 bytes).

        Raises:
            ValueError: the row lacks a column, or the chat template does not keep an answer as it is.
        """
        return tokens_after_answer(self._encoder, self._stop, self.text(row, observation), answer)

    def text(self, row: dict[str, Any], observation: str) -> str:
        """Return the text between an answer and the next one."""
        columns = row | {OBSERVATION: observation}
        said = fill(self._template, columns)
        if self._chat is None:
            return said
        history = content_of(self._task, columns)
        assert isinstance(history, list), "a task without a prompt has messages"
        return text_after_answer(self._chat, history, [{"role": "user", "content": said}])
