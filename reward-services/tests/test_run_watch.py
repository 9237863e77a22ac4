"""When the clock ends a run of code: in made-up time, with made-up CPU use."""

from __future__ import annotations

import os
import time
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


def test_a_sleeping_program_is_ended_by_the_clock() -> None:
    assert ended(asleep) == ("time", near(CLOCK))


def test_a_program_that_never_gets_a_cpu_has_no_verdict() -> None:
    assert ended(lambda now: CpuUse(True, 0.0, 0.0)) == (STARVED, near(CLOCK * (1 + MAX_WAITING)))


def test_a_program_that_never_gets_a_cpu_has_no_verdict_if_the_zygote_gets_none_either() -> None:
    never = CpuUse(True, 0.0, 0.0)
    assert ended(lambda now: never, first_look=8.0)[0] == STARVED
    assert ended(lambda now: never, first_look=200.0 / 3)[0] == STARVED


def test_a_wait_that_has_ended_is_none_of_the_programs_time() -> None:
    def waits_then_sleeps(now: float) -> CpuUse:  # the kernel counts a wait when it ends
        return CpuUse(True, 0.0, 0.0) if now < 4 else CpuUse(False, 0.1, 4.0)

    assert ended(waits_then_sleeps) == ("time", near(4 + CLOCK))


def test_a_program_that_waits_for_a_cpu_most_of_the_time_has_no_verdict() -> None:
    assert ended(lambda now: CpuUse(True, 0.05 * now, 0.9 * now)) == (STARVED, near(CLOCK * (1 + MAX_WAITING)))


def test_a_program_that_computes_is_left_to_the_limit_of_cpu_seconds() -> None:
    """The kernel ends it at ``seconds``, here not at all."""
    assert ended(lambda now: CpuUse(True, now, 0.0)) == ("time", near(CLOCK * (1 + MAX_WAITING)))


def test_a_program_that_wakes_for_each_look_gets_no_more_than_the_longest_time() -> None:
    """It sleeps between looks and computes during them, so it is runnable whenever the zygote looks."""
    assert ended(lambda now: CpuUse(True, now / 20, 0.0)) == ("time", near(CLOCK * (1 + MAX_WAITING)))


def test_the_tests_sleep_while_the_program_waits_for_a_cpu() -> None:
    assert ended(asleep, lambda now: CpuUse(True, 0.0, 0.0))[0] == STARVED
    assert ended(asleep, asleep)[0] == "time"


def test_nothing_is_read_before_the_limit() -> None:
    def fail(pid: int) -> CpuUse:
        raise AssertionError

    watch = RunWatch("", {"processes": [], "seconds": 60.0}, 0.0, lambda: 59.9, fail)
    assert watch.reason([1], look=False) == ""


def test_the_use_of_a_process_is_that_of_its_threads() -> None:
    use = cpu_use(os.getpid())
    assert use.runnable and use.spent > 0 and use.waited >= 0
    assert use.spent == pytest.approx(time.process_time(), rel=0.5)


def test_the_use_of_a_process_that_has_ended_is_none() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert cpu_use(pid) == CpuUse(False, 0.0, 0.0)
