"""The prompts of trajectories: token ids of rows, computed once for all samples of a group."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rljob.api.tasks import Task
from rljob.runner.chat import ChatTemplate
from rljob.runner.data import Source
from rljob.runner.prompt_content import OBSERVATION, content_of

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

    def make(self, task: str, problem: dict[str, Any], observation: str | None = None) -> Prompt:
        """Return the prompt of a row.

        Args:
            task: name of the task.
            problem: the row.
            observation: the first observation of the task's environment. Without it, the prompt of such a task has no
                text: the loop makes it when the episode has started. The prompt of a task with an agent never has: the
                agent writes it.

        Raises:
            ValueError: the row does not fit the task, or the chat template rejects the messages.
        """
        if self.tasks[task].agent is not None or (self.tasks[task].environment is not None and observation is None):
            return Prompt(problem, "", b"")
        row = problem if observation is None else problem | {OBSERVATION: observation}
        content = content_of(self.tasks[task], row)
        if isinstance(content, str):
            return Prompt(problem, content, self.encoder.encode(content))
        assert self.chat is not None, "setup rejects a task with messages if the model has no chat template"
        text = self.chat.render(content)
        return Prompt(problem, text, self.encoder.encode(text, special=False))


class PromptSource(Protocol):
    """Makes the prompts of a job's tasks."""

    async def prompt(self, task: str, split: str, row: int) -> Prompt:
        """Return the prompt of a row.

        Raises:
            ValueError: the row cannot be made into a prompt.
        """


class PromptCache:
    """Makes prompts in one thread for each task, because some datasets take 0.25 s for a problem, and a slow source
    must not delay other tasks; keeps the last KEPT prompts.

    Args:
        sources: task name → its source.
        maker: makes prompts from rows.
        stall_seconds: a source that gives no row for this long is no longer waited for.
    """

    def __init__(self, sources: dict[str, Source], maker: PromptMaker, stall_seconds: float) -> None:
        self._sources = sources
        self._maker = maker
        self._threads = {task: ThreadPoolExecutor(1, thread_name_prefix=f"prompts-{task}") for task in sources}
        self._making = threading.Lock()  # tokenizer and chat template are shared
        self._stall_seconds = stall_seconds
        self._progress: dict[str, float] = {}  # task → time of its last prompt
        self._kept: OrderedDict[tuple[str, str, int], asyncio.Future[Prompt]] = OrderedDict()

    async def prompt(self, task: str, split: str, row: int) -> Prompt:
        """Return the prompt of a row. An error of its source is raised to all waiting callers and is not cached.

        Raises:
            ValueError: the row cannot be made into a prompt, or the source has made no prompt for ``stall_seconds``.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        key = (task, split, row)
        made = self._kept.get(key)
        if made is None:
            made = loop.run_in_executor(self._threads[task], self._make, *key)
            made.add_done_callback(lambda _: self._progress.update({task: loop.time()}))
            self._kept[key] = made
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        # asyncio.wait: cancelling one trajectory must not cancel the other members
        while not (await asyncio.wait({made}, timeout=self._stall_seconds))[0]:
            if loop.time() - max(began, self._progress.get(task, 0.0)) >= self._stall_seconds:
                raise ValueError(
                    f"the data of task {task} gave no row for {self._stall_seconds:g} s, row {row} of split {split} is "
                    "not made; raise failurePolicy.stallSeconds, or correct the source"
                )
        try:
            return made.result()
        except BaseException:  # re-raised; a source may raise anything
            self._kept.pop(key, None)
            raise

    def close(self) -> None:
        """Stop the threads."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, task: str, split: str, row: int) -> Prompt:
        try:
            problem = self._sources[task].problem(split, row)
        except StopIteration as error:  # a future does not take it, so all callers would wait
            raise RuntimeError("StopIteration") from error
        with self._making:
            return self._maker.make(task, problem)
