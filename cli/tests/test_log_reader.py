"""Logs of components: written through a pipe, rotated without losing a line, read by time, followed over a rotation."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rljob.cli.options import complete_components, complete_runs
from rljob.local import log_pipe, log_reader, processes
from rljob.local.errors import CliError
from rljob.local.log_pipe import RotatingLog
from rljob.local.log_reader import LogReader


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(directory, component, *lines):
    with (directory / f"logs/{component}.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def texts(lines):
    return [f"{line.component}: {line.text}" for line in lines]


def test_lines_of_all_components_come_by_time_and_what_has_none_stays_with_the_line_before(directory):
    write(directory, "trainer", "2026-01-01 10:00:00,500 INFO a", "  more of a", "2026-01-01 10:00:02,000 INFO c")
    write(directory, "runner", "--- started 2026-01-01T10:00:01+00:00 ", "2026-01-01 10:00:01,700 INFO b")
    lines = LogReader(directory, []).history()
    assert texts(line for line in lines if line.component == "trainer") == [
        "trainer: 2026-01-01 10:00:00,500 INFO a",
        "trainer:   more of a",
        "trainer: 2026-01-01 10:00:02,000 INFO c",
    ]
    times = [line.time for line in lines]
    assert times == sorted(times)
    b = next(i for i, line in enumerate(lines) if line.text.endswith(" b"))
    assert lines[b - 1].text in ("  more of a", "--- started 2026-01-01T10:00:01+00:00 ")
    assert lines[b + 1].text.endswith(" c") or lines[b + 1].text.startswith("---")
    assert texts(LogReader(directory, ["trainer"]).history(tail=1)) == ["trainer: 2026-01-01 10:00:02,000 INFO c"]
    assert LogReader(directory, []).history(tail=0) == []


@pytest.fixture
def small(monkeypatch):
    """Logs are rotated early."""
    monkeypatch.setattr(log_pipe, "MAX_BYTES", 15)


def test_a_long_log_is_rotated_at_the_end_of_a_line_and_three_older_ones_are_kept(directory, small):
    path = directory / "logs/trainer.log"
    log = RotatingLog(path)
    for number in range(6):
        log.write(f"line {number}\nbegin".encode())
        log.write(b"ning of ")
    log.write(b"the end")
    log.close()
    assert path.read_text() == "beginning of the end"
    assert [(directory / f"logs/trainer.log.{i}").read_text() for i in (1, 2, 3)] == [
        "beginning of line 5\n",
        "beginning of line 4\n",
        "beginning of line 3\n",
    ]
    assert len(list(path.parent.iterdir())) == 4
    assert texts(LogReader(directory, []).history()) == [f"trainer: beginning of line {i}" for i in (3, 4, 5)]


def test_a_rotation_that_fails_renames_no_log_and_a_later_one_works(directory, small):
    path, blocked = directory / "logs/trainer.log", directory / "logs/trainer.log.new"
    log = RotatingLog(path)
    log.write(b"line 1 is long\n")
    log.write(b"line 2 is long\n")
    blocked.mkdir()  # the new file cannot be opened
    log.write(b"line 3 is long\n")
    blocked.rmdir()
    log.write(b"line 4 is long\n")
    log.write(b"5")
    log.close()
    kept = [path, *(directory / f"logs/trainer.log.{i}" for i in (1, 2))]
    assert [file.read_text() for file in kept] == [
        "5",
        "line 3 is long\nline 4 is long\n",
        "line 1 is long\nline 2 is long\n",
    ]


def test_a_log_that_a_user_deletes_or_truncates_is_written_and_followed_again(directory, small):
    path = directory / "logs/trainer.log"
    log, reader = RotatingLog(path), LogReader(directory, ["trainer"])
    log.write(b"line 1\n")
    assert texts(reader.history()) == ["trainer: line 1"]
    os.truncate(path, 0)
    log.write(b"2\n")
    assert texts(reader.history()) == ["trainer: 2"]
    path.unlink()
    log.write(b"line 3 is in the deleted file\n")  # and long enough for a rotation
    log.write(b"line 4\n")
    log.close()
    assert path.read_text() == "line 4\n" and not (directory / "logs/trainer.log.1").exists()


def test_output_without_line_ends_does_not_grow_a_log_without_limit(directory, small):
    log = RotatingLog(directory / "logs/trainer.log")
    for _ in range(100):
        log.write(b"10%\r")
    log.close()
    assert all(path.stat().st_size < 50 for path in (directory / "logs").iterdir())


def test_nothing_is_lost_to_a_reader_when_a_log_is_rotated(directory, small):
    log = RotatingLog(directory / "logs/trainer.log")
    log.write(b"one\ntwo\n")
    reader = LogReader(directory, ["trainer"])
    assert texts(reader.history()) == ["trainer: one", "trainer: two"]
    for line in ("three", "four", "five", "five and a half"):
        log.write(f"{line}\n".encode())
    log.write(b"si")
    assert texts(reader.follow(lambda: False)) == [
        "trainer: three",
        "trainer: four",
        "trainer: five",
        "trainer: five and a half",
    ]
    log.write(b"x\nseven\n")
    assert texts(reader.follow(lambda: False)) == ["trainer: six", "trainer: seven"]
    log.close()


async def test_no_line_of_a_process_is_lost_or_split_while_its_log_is_rotated_and_followed(directory, monkeypatch):
    monkeypatch.setattr(log_pipe, "MAX_BYTES", 400_000)
    count = 20_000
    program = (
        f"import sys\nfor i in range({count}): print(i, 'x' * 200, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    )
    reader = LogReader(directory, [])
    process = await processes.start(processes.ProcessCommand("trainer", [sys.executable, "-c", program]), directory)
    seen = []
    while process.returncode is None:
        seen += reader.history()
        await asyncio.sleep(0.001)
    process.close_log()
    seen += reader.history()
    assert [line.text for line in seen[1:]] == [f"{i} {'x' * 200}" for i in range(count)]
    kept = sorted(path.name for path in (directory / "logs").iterdir())
    assert kept == ["trainer.log", "trainer.log.1", "trainer.log.2", "trainer.log.3"]
    assert all(path.read_bytes()[-1:] in (b"", b"\n") for path in (directory / "logs").iterdir())


def test_following_ends_with_the_run_and_shows_components_that_came_later(directory, monkeypatch):
    write(directory, "trainer", "one")
    reader = LogReader(directory, [])
    reader.history()
    steps = iter(["trainer", "runner", None])
    monkeypatch.setattr(log_reader, "POLL_SECONDS", 0)

    def going_on():
        component = next(steps)
        if component is not None:
            write(directory, component, "news")
        return component is not None

    assert texts(reader.follow(going_on)) == ["trainer: news", "runner: news"]


def test_half_a_line_waits_for_its_end(directory):
    (directory / "logs/trainer.log").write_text("half")
    reader = LogReader(directory, [])
    assert reader.history() == []
    write(directory, "trainer", " done")
    assert texts(reader.history()) == ["trainer: half done"]


def test_a_component_without_a_log_is_refused_by_name(directory):
    write(directory, "trainer", "one")
    assert log_reader.select_components(directory, []) == ["trainer"]
    with pytest.raises(CliError, match=r"there is no log of 'tariner' in .*/logs; name one of trainer"):
        log_reader.select_components(directory, ["tariner"])


def test_runs_and_components_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complete_runs("") == complete_components("") == []
    for run in ("sums", "sorting"):
        (tmp_path / "runs" / run / "logs").mkdir(parents=True)
        (tmp_path / "runs" / run / "job.json").touch()
        (tmp_path / "runs" / run / "logs/trainer.log").touch()
    assert complete_runs("so") == ["sorting"]
    assert complete_components("") == ["sorting", "sums", "trainer"]
    assert complete_components("t") == ["trainer"]


def test_what_does_not_fit_on_a_full_disk_is_counted_in_the_log(directory):
    log = RotatingLog(directory / "logs/trainer.log")
    file = log._file
    with open("/dev/full", "wb", buffering=0) as log._file:
        log.write(b"lost\n")
    log._file = file
    log.write(b"kept\n")
    log.close()
    assert (directory / "logs/trainer.log").read_text() == "\n--- 5 bytes of output lost: the disk was full\nkept\n"


def test_processes_that_write_all_the_time_end_when_their_supervisor_is_killed(launcher):
    launcher.components["trainer"] = ["child", "chatter"]  # and a child in a session of its own that writes as much
    launcher.components["runner"] = ["chatter"]
    process = launcher.start()
    launcher.wait_for("runner", "started")
    log = launcher.directory / "logs/runner.log"
    while not log.exists() or log.stat().st_size < 100_000:
        time.sleep(0.01)
    assert launcher.alive()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 100
    while launcher.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_write_to_a_log_whose_supervisor_was_killed_fails_at_once_and_does_not_block(tmp_path):
    supervisor = f"""
import asyncio, sys, time
from pathlib import Path
from rljob.local import processes
processes.set_parent_death_signal = lambda: None
writer = '''
import pathlib
while True:
    try:
        print("x" * 1000, flush=True)
    except BrokenPipeError:
        pathlib.Path("{tmp_path}/ended").touch()
        break
'''
async def main():
    await processes.start(processes.ProcessCommand("writer", [sys.executable, "-c", writer]), Path("{tmp_path}"))
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", supervisor])
    while not (tmp_path / "logs/writer.log").exists() or (tmp_path / "logs/writer.log").stat().st_size < 100_000:
        time.sleep(0.01)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 100
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
