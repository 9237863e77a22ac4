"""The prompts of trajectories: token ids of rows, computed once for all samples of a group."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rljob.api.tasks import Task
from rljob.runner.chat import ChatTemplate
from rljob.runner.data import Source
from rljob.runner.prompt_content import content_of

KEPT = 4096


class Encoder(Protocol):
    """Encodes text as token ids (int32 bytes)."""

    def encode(self, text: str, special: bool = True) -> bytes:
        """Return the token ids of a prompt; ``special=False`` if the text already has its special tokens."""


@dataclass(frozen=True)
class Prompt:
    """The model's input for one row."""

    problem: dict[str, Any]
    text: str
    token_ids: bytes  # int32


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts from rows.

    Args:
        tasks: the job's tasks by name.
        encoder: the policy's tokenizer.
        chat: the policy's chat template; None if no task has messages.
    """

    tasks: dict[str, Task]
    encoder: Encoder
    chat: ChatTemplate | None = None

    def make(self, task: str, problem: dict[str, Any]) -> Prompt:
        """Return the prompt of a row.

        Raises:
            ValueError: the row does not fit the task, or the chat template rejects the messages.
        """
        content = content_of(self.tasks[task], problem)
        if isinstance(content, str):
            return Prompt(problem, content, self.encoder.encode(content))
        assert self.chat is not None, "setup rejects a task with messages if the model has no chat template"
        text = self.chat.render(content)
        return Prompt(problem, text, self.encoder.encode(text, special=False))


class PromptCache:
    """Makes prompts in one thread, because some datasets take 0.25 s for a problem; keeps the last KEPT prompts.

    Args:
        sources: task name → its source.
        maker: makes prompts from rows.
    """

    def __init__(self, sources: dict[str, Source], maker: PromptMaker) -> None:
        self._sources = sources
        self._maker = maker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._kept: OrderedDict[tuple[str, str, int], asyncio.Future[Prompt]] = OrderedDict()

    async def prompt(self, task: str, split: str, row: int) -> Prompt:
        """Return the prompt of a row. An error of its source is raised to all waiting callers and is not cached."""
        key = (task, split, row)
        made = self._kept.get(key)
        if made is None:
            made = asyncio.get_running_loop().run_in_executor(self._thread, self._make, *key)
            self._kept[key] = made
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        try:
            return await asyncio.shield(made)  # cancelling one trajectory must not cancel the other members
        except Exception:  # re-raised; a source may raise anything
            self._kept.pop(key, None)
            raise

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, task: str, split: str, row: int) -> Prompt:
        return self._maker.make(task, self._sources[task].problem(split, row))
