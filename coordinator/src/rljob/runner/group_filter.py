"""User-written group filters: the function of `tasks[].groupFilter.function` decides whether a group is trained.

The functions of a runner's tasks run in threads: one thread for each task, which calls it for one group after another.
A thread cannot be ended, so another one replaces a thread whose function hangs, MOST_HANGING times at most.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from rljob.api.extensions import is_async, load
from rljob.api.text_escape import short_line
from rljob.protocol.runner_protocol import FilterGroup, GroupFiltered
from rljob.runner.error_text import described_error

MOST_CHARACTERS = 500
"""Of the text of an exception or a value in a reason."""
MOST_HANGING = 16
"""Threads of a task whose function has not returned in time. A thread that computes slows the others of the runner."""


class Verdict(NamedTuple):
    """Whether a group is trained; ``reason``: why the function could not decide, or empty."""

    accepted: bool
    reason: str = ""


GroupFilter: TypeAlias = Callable[[list[float]], Awaitable[Verdict]]
"""Decides about a group by the rewards of its members. It does not raise."""
Function: TypeAlias = Callable[[list[float]], Any]


def load_function(reference: str, field: str) -> Function:
    """Return the function that ``tasks[].groupFilter.function`` names.

    Args:
        reference: module:attribute.
        field: path of the field, for errors.

    Raises:
        ValueError: it cannot be imported, or is not a function of one argument.
    """
    function: Any = load({}, reference, field)
    if isinstance(function, type) or not callable(function) or is_async(function):
        raise ValueError(f"{field}: {reference} is not a function; define it as def accept(rewards) -> bool, not async")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ValueError(
            f"{field}: {reference} does not take one argument; define it as def accept(rewards) -> bool"
        ) from None
    found: Function = function
    return found


class FilterFunction:
    """The filter of one task. It implements :data:`GroupFilter`.

    Args:
        task: name of the task.
        reference: module:attribute, for reasons.
        function: of the user.
        limit_seconds: a call that takes longer has failed.
    """

    def __init__(self, task: str, reference: str, function: Function, limit_seconds: float) -> None:
        self._name = f"tasks[{task}].groupFilter.function {reference}"
        self._function = function
        self._limit = limit_seconds
        self._worker: _Worker | None = None
        self._calling = asyncio.Lock()
        self._hanging: set[asyncio.Future[Verdict]] = set()

    async def __call__(self, rewards: list[float]) -> Verdict:
        """Return the decision of the function. Calls wait for the calls before them. While MOST_HANGING calls have not
        returned, there are no others."""
        async with self._calling:
            if len(self._hanging) >= MOST_HANGING:
                calls = f"{len(self._hanging)} earlier calls"
                return Verdict(
                    False, f"{self._name} was not called, as {calls} have not returned; correct the function"
                )
            if self._worker is None:
                self._worker = _Worker(self._decide)
            called, limit = self._worker.call([*rewards]), self._limit
            done, _ = await asyncio.wait({called}, timeout=limit)
            if not done:
                self._hanging.add(called)
                called.add_done_callback(self._hanging.discard)
                self._worker.leave()
                self._worker = None
                return Verdict(
                    False,
                    f"{self._name} returned nothing for {limit:g} s; raise failurePolicy.stallSeconds, or "
                    "correct the function",
                )
        return called.result()

    def _decide(self, rewards: list[float]) -> Verdict:
        """Call the function, in its thread; the texts of its errors and values are code of the user, too."""
        try:
            value = self._function(rewards)
            if _is_bool(value):
                return Verdict(bool(value))
            found = f"returned {short_line(repr(value), MOST_CHARACTERS)}; return True or False"
        except BaseException as error:  # noqa: BLE001 of a user's function: it becomes the reason of its samples
            found = f"raised {short_line(described_error(error), MOST_CHARACTERS)}"
        return Verdict(False, f"{self._name} {found}")


def _is_bool(value: Any) -> bool:
    """Return whether a value is a bool of Python or of NumPy, which need not be installed."""
    kind = type(value)
    return isinstance(value, bool) or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


class _Worker:
    """A thread that decides about groups. It is a daemon: it does not keep the runner alive."""

    def __init__(self, decide: Callable[[list[float]], Verdict]) -> None:
        self._decide = decide
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[list[float], asyncio.Future[Verdict]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="group filter").start()

    def call(self, rewards: list[float]) -> asyncio.Future[Verdict]:
        """Start a call, and return its future result."""
        called: asyncio.Future[Verdict] = self._loop.create_future()
        self._calls.put((rewards, called))
        return called

    def leave(self) -> None:
        """End the thread once its function has returned."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            rewards, called = call
            verdict = self._decide(rewards)
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(_finish, called, verdict)


def _finish(called: asyncio.Future[Verdict], verdict: Verdict) -> None:
    if not called.done():  # it is, if the runner is closed
        called.set_result(verdict)


@dataclass(eq=False)
class _Question:
    """A question of the coordinator, and its answer."""

    number: int
    answer: GroupFiltered | None = None


class FilteredGroups:
    """The groups that a runner filters, kept until the coordinator acknowledges the answers.

    Args:
        filters: task → filter.
        send: sends a message to the coordinator.
    """

    def __init__(self, filters: Mapping[str, GroupFilter], send: Callable[[object], None]) -> None:
        self._filters = filters
        self._send = send
        self._questions: dict[str, _Question] = {}  # by group
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> list[GroupFiltered]:
        """The answers to send again after a reconnect."""
        return [question.answer for question in self._questions.values() if question.answer is not None]

    def ask(self, message: FilterGroup) -> None:
        """Decide about a group. A repeated question is not decided again, and an older one is ignored."""
        known = self._questions.get(message.group)
        if known is not None and known.number >= message.number:
            if known.number == message.number and known.answer is not None:
                self._send(known.answer)
            return
        question = self._questions[message.group] = _Question(message.number)
        task = asyncio.create_task(self._decide(question, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def acknowledge(self, numbers: Iterable[int]) -> None:
        """Forget the answers to questions."""
        done = set(numbers)
        self._questions = {group: known for group, known in self._questions.items() if known.number not in done}

    def close(self) -> None:
        """Stop waiting for functions; the coordinator asks again."""
        for task in self._tasks:
            task.cancel()

    async def _decide(self, question: _Question, message: FilterGroup) -> None:
        function = self._filters.get(message.task)
        if function is None:
            verdict = Verdict(False, f"tasks[{message.task}].groupFilter.function: the runner has no such function")
        else:
            verdict = await function(message.rewards)
        if self._questions.get(message.group) is question:
            question.answer = GroupFiltered(message.group, message.number, verdict.accepted, verdict.reason)
            self._send(question.answer)
