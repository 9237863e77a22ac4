"""One component under a supervisor: real processes, real signals."""

import asyncio
import contextlib
import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from rljob.api.run_policy import FailurePolicy
from rljob.local import process_cleanup, processes
from rljob.local.component_supervisor import End, RestartBackoff, Supervisor
from rljob.local.errors import CliError
from rljob.local.processes import Interrupt, ProcessCommand

FAKE = Path(__file__).parent / "fakes" / "component.py"
HANG_SECONDS = 1.0
"""Minimum of the manifest's field. On a busy machine, pauses of the supervisor over half of it are not counted."""
QUICK = RestartBackoff(first=0.005, last=0.02, after_success=0.005)


class Events(list):
    """Recorded events; tests can wait for one."""

    def __init__(self):
        self._more = asyncio.Event()

    def __call__(self, subject, event, **details):
        self.append((subject, event, details))
        self._more.set()

    async def wait_for(self, event, count=1):
        while sum(e == event for _, e, _ in self) < count:
            self._more.clear()
            await self._more.wait()
        return [details for _, e, details in self if e == event][count - 1]


def is_stopped(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"T")
    return False


def fake(*acts, name="component"):
    return ProcessCommand(name, [sys.executable, "-I", "-S", str(FAKE), *acts])


async def wait_for_log(path, text):
    """Wait until a log contains ``text``; there is no event for writes of another process."""
    while not path.exists() or text not in path.read_text():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def supervised(directory, command, max_restarts=20, hang_seconds=60.0):
    events, interrupt = Events(), Interrupt()
    policy = FailurePolicy.model_construct(max_restarts=max_restarts, hang_seconds=hang_seconds)
    supervisor = Supervisor(command, directory, policy, events, QUICK)
    task = asyncio.create_task(supervisor.run(interrupt))
    try:
        yield supervisor, events, interrupt, task
    finally:
        interrupt.stop.set()
        interrupt.kill.set()
        await asyncio.wait([task])
        assert not process_cleanup.marked(processes.mark(directory))


async def test_a_killed_component_is_restarted(tmp_path):
    async with supervised(tmp_path, fake("wait")) as (supervisor, events, _, _):
        first = await events.wait_for("started")
        os.kill(first["pid"], signal.SIGKILL)
        second = await events.wait_for("started", 2)
        assert second["pid"] != first["pid"]
        assert second["restarts"] == supervisor.restarts == 1
        assert (await events.wait_for("restarting"))["code"] == -signal.SIGKILL


async def test_a_component_that_receives_sigterm_exits_by_itself(tmp_path):
    async with supervised(tmp_path, fake("wait")) as (supervisor, events, interrupt, task):
        await wait_for_log(tmp_path / "logs/component.log", "waiting")
        interrupt.stop.set()
        await task
        assert (await events.wait_for("exited"))["code"] == 0
        assert supervisor.state == "stopped"


async def test_a_component_that_ignores_sigterm_is_killed_on_the_second_signal(tmp_path):
    async with supervised(tmp_path, fake("ignore")) as (_, events, interrupt, task):
        await wait_for_log(tmp_path / "logs/component.log", "ignoring")
        interrupt.stop.set()
        await asyncio.sleep(0)
        assert not task.done()
        interrupt.kill.set()
        await task
        assert (await events.wait_for("exited"))["code"] == -signal.SIGKILL


async def test_a_component_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    process = await processes.start(fake("ignore"), tmp_path)
    await wait_for_log(tmp_path / "logs/component.log", "ignoring")
    await processes.end(process, asyncio.Event(), grace=0.01)
    assert process.returncode == -signal.SIGKILL


async def test_a_stopped_grandchild_in_another_session_without_the_environment_is_detected(tmp_path):
    shell = "setsid env -i sh -c 'sleep 99 & echo $!; echo ready; wait' & wait"
    async with supervised(tmp_path, ProcessCommand("component", ["sh", "-c", shell]), hang_seconds=HANG_SECONDS) as (
        _,
        events,
        _,
        _,
    ):
        await wait_for_log(tmp_path / "logs/component.log", "ready")
        pid = int((tmp_path / "logs/component.log").read_text().splitlines()[-2])
        os.kill(pid, signal.SIGSTOP)
        assert (await events.wait_for("restarting"))["still"] == HANG_SECONDS
        while is_stopped(pid):  # it was sent SIGKILL
            await asyncio.sleep(0.002)


async def test_descendants_of_a_killed_component_in_another_session_are_killed(tmp_path):
    async with supervised(tmp_path, fake("child", "wait")) as (_, events, _, _):
        first = await events.wait_for("started")
        await wait_for_log(tmp_path / "logs/component.log", "waiting\nwaiting")
        everything = process_cleanup.marked(processes.mark(tmp_path, "component"))
        assert len(everything) == 2
        os.kill(first["pid"], signal.SIGKILL)
        await events.wait_for("restarting")
        assert not set(everything) & set(process_cleanup.marked(processes.mark(tmp_path, "component")))


async def test_exit_code_2_ends_the_run_and_reports_the_end_of_the_log(tmp_path):
    async with supervised(tmp_path, fake("say", "no such pool", "exit", "2")) as (_, _, _, task):
        with pytest.raises(CliError, match="component rejects its configuration") as caught:
            await task
        assert caught.value.exit_code == 2
        assert caught.value.log == f"{tmp_path}/logs/component.log:\n  no such pool"


async def test_more_restarts_than_allowed_end_the_run(tmp_path):
    async with supervised(tmp_path, fake("exit", "3"), max_restarts=2) as (_, events, _, task):
        with pytest.raises(
            CliError, match=r"component exited with code 3 and exceeded spec.failurePolicy.maxRestarts \(2\)"
        ) as c:
            await task
        assert c.value.exit_code == 1
        assert len([e for e in events if e[1] == "started"]) == 3


async def test_exits_with_code_0_that_end_the_run_are_told_with_the_last_line_of_the_log(tmp_path):
    actions = ("say", "received SIGTERM", "exit", "0")
    async with supervised(tmp_path, fake(*actions), max_restarts=0) as (_, _, _, task):
        with pytest.raises(CliError) as caught:
            await task
    assert str(caught.value) == (
        "component exited with code 0 (received SIGTERM) and exceeded spec.failurePolicy.maxRestarts (0)"
    )
    assert caught.value.log.startswith(f"{tmp_path}/logs/component.log:\n")


async def test_a_component_that_exits_0_while_the_run_continues_is_restarted(tmp_path):
    async with supervised(tmp_path, fake("once", str(tmp_path / "done"), "0", "wait")) as (_, events, _, _):
        assert (await events.wait_for("restarting"))["code"] == 0
        await events.wait_for("started", 2)


def test_waits_double_with_quick_exits_and_are_reset_after_a_stable_run():
    backoff = RestartBackoff()
    waits = [0.0]
    for lived in [1, 1, 1, 60, 1]:
        waits.append(backoff.next(waits[-1], lived))
    assert waits[1:] == [0.2, 0.4, 0.8, 0.2, 0.4]
    assert backoff.next(20, lived=9) == backoff.last == 30


async def test_a_stable_run_forgives_earlier_restarts(tmp_path):
    supervisor = Supervisor(
        fake(), tmp_path, FailurePolicy(max_restarts=1), lambda *a, **k: None, RestartBackoff(forgiveness_seconds=10)
    )
    supervisor._charge(End(1), lived=1)
    supervisor._charge(End(1), lived=11)
    with pytest.raises(CliError):
        supervisor._charge(End(1), lived=9)
    assert supervisor.restarts == 2


async def test_a_program_that_does_not_exist_is_a_configuration_error(tmp_path):
    async with supervised(tmp_path, ProcessCommand("component", [str(tmp_path / "none")])) as (_, _, _, task):
        with pytest.raises(CliError, match="component cannot be started") as caught:
            await task
        assert caught.value.exit_code == 2


async def test_a_stopped_component_is_killed_with_its_descendants_and_restarted(tmp_path):
    async with supervised(tmp_path, fake("child", "wait"), hang_seconds=HANG_SECONDS) as (_, events, _, _):
        first = await events.wait_for("started")
        await wait_for_log(tmp_path / "logs/component.log", "waiting\nwaiting")
        everything = process_cleanup.marked(processes.mark(tmp_path, "component"))
        os.kill(first["pid"], signal.SIGSTOP)
        assert await events.wait_for("restarting") == {"code": -signal.SIGKILL, "still": HANG_SECONDS}
        assert not set(everything) & set(process_cleanup.marked(processes.mark(tmp_path, "component")))
        await events.wait_for("started", 2)


@pytest.mark.parametrize("child", ["child", "titled"])
async def test_a_component_with_a_stopped_child_is_restarted(tmp_path, child):
    async with supervised(tmp_path, fake(child, "wait"), hang_seconds=HANG_SECONDS) as (_, events, _, _):
        first = await events.wait_for("started")
        await wait_for_log(tmp_path / "logs/component.log", "waiting\nwaiting")
        (child,) = set(process_cleanup.marked(processes.mark(tmp_path, "component"))) - {first["pid"]}
        os.kill(child, signal.SIGSTOP)
        assert (await events.wait_for("restarting"))["still"] == HANG_SECONDS


async def test_a_component_whose_heartbeat_does_not_change_is_restarted(tmp_path):
    async with supervised(tmp_path, fake("beat", "wait"), hang_seconds=HANG_SECONDS) as (_, events, _, _):
        assert (await events.wait_for("restarting"))["still"] == HANG_SECONDS


async def test_exits_on_a_full_disk_name_it_and_are_not_counted_until_there_is_space(tmp_path, monkeypatch):
    class Usage:
        total, free = 1 << 40, 0

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    async with supervised(tmp_path, fake("exit", "1"), max_restarts=1) as (_, events, _, task):
        full = await events.wait_for("restarting", 4)
        assert full == {"code": 1, "full": str(tmp_path)}
        assert (
            processes.describe_restart(full) == f"exited with code 1 (the disk of {tmp_path} is full: make room there)"
        )
        Usage.free = 1 << 30
        with pytest.raises(
            CliError, match=r"component exited with code 1 and exceeded spec.failurePolicy.maxRestarts \(1\)"
        ):
            await task


async def test_a_start_that_fails_on_a_full_disk_is_retried(tmp_path, monkeypatch):
    start, refusals = processes.start, [OSError(errno.ENOSPC, "No space left on device")]

    async def starting(*arguments):
        if refusals:
            raise refusals.pop()
        return await start(*arguments)

    monkeypatch.setattr(processes, "start", starting)
    async with supervised(tmp_path, fake("wait")) as (supervisor, events, _, _):
        await events.wait_for("started")
        assert supervisor.restarts == 1


def test_the_tail_of_a_log_contains_only_the_newest_process(tmp_path):
    path = tmp_path / "component.log"
    path.write_text("--- started a\nold\n--- started b\nnew\nnewer\n")
    assert processes.tail(path) == f"{path}:\n  new\n  newer"
    assert processes.tail(tmp_path / "none.log") == str(tmp_path / "none.log")
    assert processes.last_line(path) == "newer"
    assert processes.last_line(tmp_path / "none.log") == ""
    path.write_text("--- started a\n")
    assert processes.last_line(path) == ""
    path.write_text(f"--- started a\n{'long ' * 10_000}\n")
    assert processes.last_line(path) == f"{'long ' * (processes.LINE_CHARACTERS // 5)} …"


def test_marks_of_components_do_not_overlap(tmp_path):
    assert not processes.mark(tmp_path, "reward-ab").startswith(processes.mark(tmp_path, "reward-a"))
    assert processes.mark(tmp_path, "reward-a").startswith(processes.mark(tmp_path))


async def test_exit_code_2_ends_the_run_and_reports_the_last_error_of_the_log(tmp_path):
    record = "2026-11-23 02:04:28,210 ERROR root: pool 'main' cannot start its engine: head_dim=16"
    async with supervised(tmp_path, fake("say", f"starting\n{record}\nmore", "exit", "2")) as (_, _, _, task):
        with pytest.raises(CliError) as caught:
            await task
        assert caught.value.exit_code == 2
        assert caught.value.sentence == "component: pool 'main' cannot start its engine: head_dim=16"
        assert caught.value.log == f"{tmp_path}/logs/component.log"


def test_the_last_error_of_a_log_is_that_of_its_newest_process(tmp_path):
    path = tmp_path / "component.log"
    record = "2026-11-23 02:04:28,210 {} rljob.rollout.agent: {}"
    path.write_text(f"--- started a\n{record.format('ERROR', 'old')}\n--- started b\nERROR: usage\n")
    assert processes.last_error(path) == ""
    with path.open("a") as log:
        for level, text in (("ERROR", "first"), ("ERROR", "second: a"), ("INFO", "third")):
            log.write(f"{record.format(level, text)}\n")
        log.write("(EngineCore pid=7) ERROR 11-23 02:04:27 [core.py:1] RuntimeError: x\n")
    assert processes.last_error(path) == "second: a"
    assert processes.last_error(tmp_path / "none.log") == ""
