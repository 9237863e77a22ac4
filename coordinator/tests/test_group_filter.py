"""User-written group filters in the runner: what they return, raise, or do not return, and what a runner repeats."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from rljob.protocol.runner_protocol import FilterGroup, GroupFiltered
from rljob.runner import group_filter
from rljob.runner.group_filter import FilteredGroups, FilterFunction, Verdict, load_function

NAME = "tasks[sums].groupFilter.function mypackage:accept"


class BadError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class BadValue:
    def __repr__(self) -> str:
        raise ValueError("no text")


def numpy_bool(rewards: list[float]) -> Any:
    return pytest.importorskip("numpy").float32(sum(rewards)) > 0


def raises(error: BaseException) -> Callable[[list[float]], Any]:
    def function(rewards: list[float]) -> Any:
        raise error

    return function


def changes_rewards(rewards: list[float]) -> bool:
    return bool(rewards.pop())


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (lambda rewards: sum(rewards) > 0.5, (True, "")),
        (lambda rewards: sum(rewards) < 0.5, (False, "")),
        (numpy_bool, (True, "")),
        (changes_rewards, (True, "")),
        (raises(ValueError("two\nlines")), (False, f"{NAME} raised ValueError: two\\nlines")),
        (raises(SystemExit(3)), (False, f"{NAME} raised SystemExit: 3")),
        (raises(StopIteration()), (False, f"{NAME} raised StopIteration")),
        (raises(BadError()), (False, f"{NAME} raised BadError")),
        (lambda rewards: 1, (False, f"{NAME} returned 1; return True or False")),
        (lambda rewards: None, (False, f"{NAME} returned None; return True or False")),
        (lambda rewards: BadValue(), (False, f"{NAME} raised ValueError: no text")),
        (lambda rewards: "x" * 600, (False, f"{NAME} returned '{'x' * 498}…; return True or False")),
    ],
)
async def test_a_filter_gives_its_verdict_or_a_sentence_that_names_the_field(
    function: Callable[[list[float]], Any], verdict: tuple[bool, str]
) -> None:
    rewards = [0.0, 1.0]
    decide = FilterFunction("sums", "mypackage:accept", function, 60.0)
    assert await decide(rewards) == verdict
    assert rewards == [0.0, 1.0]


async def test_a_filter_that_hangs_fails_its_group_and_decides_about_the_next_one() -> None:
    release, threads = threading.Event(), []

    def function(rewards: list[float]) -> bool:
        threads.append(threading.current_thread())
        return rewards[0] > 0 or release.wait()

    decide = FilterFunction("sums", "mypackage:accept", function, 0.01)
    hanging, next_ = asyncio.create_task(decide([0.0])), asyncio.create_task(decide([1.0]))
    await asyncio.sleep(0)  # the first call has begun, with its limit
    decide._limit = 60.0
    reason = f"{NAME} returned nothing for 0.01 s; raise failurePolicy.stallSeconds, or correct the function"
    assert await hanging == Verdict(False, reason)
    assert await next_ == Verdict(True)
    assert await decide([1.0]) == Verdict(True)
    release.set()
    assert len(threads) == 3 and threads[0] is not threads[1] and threads[1] is threads[2]
    threads[0].join(10)
    assert not threads[0].is_alive(), "the thread that was replaced has ended"
    assert all(thread.daemon for thread in threads)


async def test_the_threads_of_a_function_that_hangs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_filter, "MOST_HANGING", 2)
    release, threads = threading.Event(), []

    def function(rewards: list[float]) -> bool:
        threads.append(threading.current_thread())
        return release.wait()

    decide = FilterFunction("sums", "mypackage:accept", function, 0.01)
    for _ in range(2):
        assert "returned nothing for 0.01 s" in (await decide([0.0])).reason
    reason = f"{NAME} was not called, as 2 earlier calls have not returned; correct the function"
    assert [await decide([0.0]) for _ in range(3)] == [Verdict(False, reason)] * 3
    assert len(threads) == 2
    release.set()
    await asyncio.wait_for(asyncio.wait([*decide._hanging]), 10)
    decide._limit = 60.0
    assert await decide([0.0]) == Verdict(True), "the function is called again once it has returned"
    assert len(threads) == 3


async def no(rewards: list[float]) -> bool:
    return False


def two(rewards: list[float], other: int) -> bool:
    return True


@pytest.fixture
def user_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a user."""
    functions = {"ok": changes_rewards, "partial": functools.partial(two, other=1), "no": no, "two": two}
    package = types.SimpleNamespace(**functions, BadValue=BadValue)
    monkeypatch.setitem(sys.modules, "user_package", package)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("no_such_package:accept", "f: module no_such_package cannot be imported (ModuleNotFoundError: "),
        ("math:accept", "f: module math has no attribute accept; correct 'math:accept'"),
        ("math:pi", "f: math:pi is not a function; define it as def accept(rewards) -> bool, not async"),
        (
            "user_package:no",
            "f: user_package:no is not a function; define it as def accept(rewards) -> bool, not async",
        ),
        ("user_package:BadValue", "f: user_package:BadValue is not a function; "),
        (
            "user_package:two",
            "f: user_package:two does not take one argument; define it as def accept(rewards) -> bool",
        ),
    ],
)
def test_a_reference_that_is_no_filter_is_an_error_of_the_field(
    user_package: None, reference: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        load_function(reference, "f")


@pytest.mark.parametrize("name", ["ok", "partial"])
def test_a_function_of_one_argument_is_a_filter(user_package: None, name: str) -> None:
    assert load_function(f"user_package:{name}", "f")([1.0]) is True


class Groups:
    """FilteredGroups whose filter answers when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.asked: list[list[float]] = []
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.groups = FilteredGroups({"sums": self.decide}, self.sent.append)

    async def decide(self, rewards: list[float]) -> Verdict:
        self.asked.append(rewards)
        return await asyncio.shield(self.verdict)

    async def ask(self, number: int, task: str = "sums") -> None:
        self.groups.ask(FilterGroup("g1", task, number, [float(number)]))
        await self.turn()

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


async def test_an_answer_is_repeated_until_it_is_acknowledged() -> None:
    world = Groups()
    await world.ask(7)
    assert world.groups.pending == []
    world.verdict.set_result(Verdict(True))
    await world.turn()
    answer = GroupFiltered("g1", 7, True)
    assert world.sent == world.groups.pending == [answer]
    await world.ask(7)
    assert world.sent == [answer, answer] and len(world.asked) == 1
    world.groups.acknowledge([8])
    assert world.groups.pending == [answer]
    world.groups.acknowledge([7])
    assert world.groups.pending == []


async def test_a_question_with_a_higher_number_takes_the_place_of_an_older_one() -> None:
    world = Groups()
    await world.ask(7)
    await world.ask(9)
    await world.ask(8)
    world.verdict.set_result(Verdict(False, "it raised"))
    await world.turn()
    assert world.asked == [[7.0], [9.0]]
    assert world.sent == [GroupFiltered("g1", 9, False, "it raised")]


async def test_a_question_that_is_acknowledged_before_its_answer_has_none() -> None:
    world = Groups()
    await world.ask(7)
    world.groups.acknowledge([7])
    world.verdict.set_result(Verdict(True))
    await world.turn()
    assert world.sent == world.groups.pending == []


async def test_a_task_without_a_filter_fails_its_group() -> None:
    world = Groups()
    await world.ask(7, "products")
    assert world.sent == [
        GroupFiltered("g1", 7, False, "tasks[products].groupFilter.function: the runner has no such function")
    ]


async def test_a_closed_runner_sends_no_answer() -> None:
    world = Groups()
    await world.ask(7)
    world.groups.close()
    world.verdict.set_result(Verdict(True))
    await world.turn()
    assert world.sent == []
