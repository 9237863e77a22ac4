"""The prompts of trajectories: rows turned into token ids, once for all samples of a group."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rljob.api.models import Task

KEPT = 4096


class Source(Protocol):
    """Where problems come from."""

    def problem(self, split: str, row: int) -> dict[str, Any]:
        """Return a row of a split."""


class Encoder(Protocol):
    """Makes token ids (int32 bytes) of text."""

    def encode(self, text: str) -> bytes:
        """Return the token ids of a prompt."""


@dataclass(frozen=True)
class Prompt:
    """What the model is given for one row."""

    problem: dict[str, Any]
    text: str
    token_ids: bytes  # int32


def render(template: str, question: str) -> str:
    """Return the prompt's text. Braces other than {question} stay as they are."""
    return template.replace("{question}", question)


class PromptBook:
    """Makes prompts in one thread, as some datasets take a quarter of a second for a problem, and keeps the last ones.

    Args:
        sources: task name → its source.
        tasks: task name → the task.
        encoder: the policy's tokenizer.
    """

    def __init__(self, sources: dict[str, Source], tasks: dict[str, Task], encoder: Encoder) -> None:
        self._sources = sources
        self._tasks = tasks
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._kept: OrderedDict[tuple[str, str, int], asyncio.Future[Prompt]] = OrderedDict()

    async def prompt(self, task: str, split: str, row: int) -> Prompt:
        """Return the prompt of a row; whatever its source raises is raised to all who wait and not kept."""
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
            return await asyncio.shield(made)  # one trajectory's cancellation is none of the other members' business
        except Exception:  # re-raised; a source may raise anything
            self._kept.pop(key, None)
            raise

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, task: str, split: str, row: int) -> Prompt:
        problem = self._sources[task].problem(split, row)
        text = render(self._tasks[task].prompt, problem["question"])
        return Prompt(problem, text, self._encoder.encode(text))
