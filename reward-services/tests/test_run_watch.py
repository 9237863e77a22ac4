"""When the clock ends a run of code: in made-up time, with made-up CPU use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from rljob.rewards.sandbox.run_watch import MAX_WAITING, STARVED, CpuUse, RunWatch, cpu_use

CLOCK = 2.5
TICK = 0.02


def ended(use: Callable[[float], CpuUse], *others: Callable[[float], CpuUse], first_look: float = 0.0) -> tuple:
    """Return the reason and the second at which a run ends whose processes have these uses at a second."""
    now = 0.0
    uses = [use, *others]
    watch = RunWatch("", {"processes": [], "seconds": CLOCK}, 0.0, lambda: now, lambda pid: uses[pid](now))
    now = first_look
    while not (why := watch.reason(range(len(uses)), look=False)):
        now += TICK
        assert now < 100, "the run does not end"
    return why, now


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=2 * TICK)


def asleep(now: float) -> CpuUse:
    return CpuUse(False, 0.01, 0.0)


def runnable(now: float) -> CpuUse:
    """A program that waits for a CPU: the kernel counts a wait when it ends."""
    return CpuUse(True, 0.01, 0.0)


LONGEST = CLOCK * (1 + MAX_WAITING)


def test_a_sleeping_program_is_ended_by_the_clock() -> None:
    assert ended(asleep) == ("time", near(CLOCK))
    assert ended(asleep, first_look=100.0) == ("time", 100.0), "however late the zygote looks"


def test_a_program_that_never_gets_a_cpu_has_no_verdict() -> None:
    assert ended(runnable) == (STARVED, near(LONGEST))


@pytest.mark.parametrize("first_look", [8.0, 100.0])
def test_a_program_that_never_gets_a_cpu_has_no_verdict_if_the_zygote_gets_none_either(first_look: float) -> None:
    assert ended(runnable, first_look=first_look)[0] == STARVED


def test_a_wait_that_has_ended_is_none_of_the_programs_time() -> None:
    assert ended(lambda now: runnable(now) if now < 4 else CpuUse(False, 0.01, 4.0)) == ("time", near(4 + CLOCK))


def test_the_sleep_of_a_run_is_when_none_of_its_processes_needs_a_cpu() -> None:
    now = 0.0
    uses = [lambda: CpuUse(now < 1, 0.0, 0.0), lambda: CpuUse(2 < now < 2.2, 0.0, 0.0)]
    processes = [{"files": False}] * 2
    watch = RunWatch("", {"processes": processes, "seconds": CLOCK}, 0.0, lambda: now, lambda pid: uses[-pid - 1]())
    while now < 2.4:
        now += TICK
        assert not watch.reason((-1, -2), look=True)  # no processes of the machine
    assert watch.slept == near(1.2)


def test_a_program_that_waits_for_a_cpu_most_of_the_time_has_no_verdict() -> None:
    assert ended(lambda now: CpuUse(False, 0.05 * now, 0.9 * now)) == (STARVED, near(LONGEST))


def test_a_program_that_computes_is_left_to_the_limit_of_cpu_seconds_and_then_to_the_clock() -> None:
    """It has ended, or sleeps, before the longest time: the kernel ends it at ``seconds`` of CPU."""
    assert ended(lambda now: CpuUse(now < 3, min(now, 2.0), 0.0)) == ("time", near(3))


def test_a_program_that_has_had_the_time_of_the_clock_on_a_cpu_is_ended() -> None:
    """The limit of CPU seconds may be longer than that of the clock."""
    assert ended(lambda now: CpuUse(True, 0.8 * now, 0.0)) == ("time", near(CLOCK / 0.8))
    assert ended(lambda now: CpuUse(True, 0.4 * now, 0.0), lambda now: CpuUse(True, 0.4 * now, 0.0))[0] == "time"


def test_the_tests_sleep_while_the_program_waits_for_a_cpu() -> None:
    assert ended(asleep, runnable)[0] == STARVED
    assert ended(asleep, asleep) == ("time", near(CLOCK))
    assert ended(lambda now: CpuUse(False, 0.01, 1.0), lambda now: CpuUse(False, 0.01, 2.0)) == (
        "time",
        near(CLOCK + 3),
    )


@pytest.mark.parametrize(
    ("uses", "running", "waited"),
    [
        ([CpuUse(True, 2.0, 0.0)], True, 8.0),  # it has been waiting since
        ([CpuUse(True, 2.0, 3.0)], False, 3.0),
        ([CpuUse(False, 2.0, 3.0)], True, 3.0),  # it slept
        ([CpuUse(False, 1.0, 4.0), CpuUse(False, 1.0, 5.0)], True, 8.0),  # not longer than the run
        ([CpuUse(False, 0.0, 0.0)], True, 0.0),
    ],
)
def test_how_long_a_run_has_waited(uses: list[CpuUse], running: bool, waited: float) -> None:
    watch = RunWatch("", {"processes": [], "seconds": 2.5}, 0.0, lambda: 10.0, uses.__getitem__)
    assert watch.waited(range(len(uses)), running) == waited


def test_nothing_is_read_before_the_limit() -> None:
    def fail(pid: int) -> CpuUse:
        raise AssertionError

    watch = RunWatch("", {"processes": [], "seconds": 60.0}, 0.0, lambda: 59.9, fail)
    assert watch.reason([1], look=False) == ""


def test_the_use_of_this_process_is_that_of_its_threads() -> None:
    asleep = threading.Event()
    thread = threading.Thread(target=asleep.wait)
    thread.start()
    found = cpu_use(os.getpid())
    asleep.set()
    thread.join()
    assert found.runnable and found.waited >= 0
    assert found.spent > 0


def test_a_sleeping_process_is_not_runnable() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        for _ in range(1000):
            if not (found := cpu_use(pid)).runnable:
                break
            os.sched_yield()
            threading.Event().wait(0.01)
        assert found == CpuUse(False, found.spent, found.waited) and found.spent > 0 and found.waited >= 0
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_the_use_of_a_process_that_has_ended_is_none() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert cpu_use(pid) == CpuUse(False, 0.0, 0.0)
