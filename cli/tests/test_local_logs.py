"""Logs of parts: read by time, followed over a rotation, kept short."""

import errno
import shutil

import pytest

from rljob.cli.options import complete_parts, complete_runs
from rljob.local import logs
from rljob.local.errors import CliError
from rljob.local.logs import Reader, rotate


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(directory, part, *lines):
    with (directory / f"logs/{part}.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def texts(lines):
    return [f"{line.part}: {line.text}" for line in lines]


def test_lines_of_all_parts_come_by_time_and_what_has_none_stays_with_the_line_before(directory):
    write(directory, "trainer", "2026-01-01 10:00:00,500 INFO a", "  more of a", "2026-01-01 10:00:02,000 INFO c")
    write(directory, "runner", "--- started 2026-01-01T10:00:01+00:00 ", "2026-01-01 10:00:01,700 INFO b")
    lines = Reader(directory, []).history()
    assert texts(line for line in lines if line.part == "trainer") == [
        "trainer: 2026-01-01 10:00:00,500 INFO a",
        "trainer:   more of a",
        "trainer: 2026-01-01 10:00:02,000 INFO c",
    ]
    times = [line.time for line in lines]
    assert times == sorted(times)
    b = next(i for i, line in enumerate(lines) if line.text.endswith(" b"))
    assert lines[b - 1].text in ("  more of a", "--- started 2026-01-01T10:00:01+00:00 ")
    assert lines[b + 1].text.endswith(" c") or lines[b + 1].text.startswith("---")
    assert texts(Reader(directory, ["trainer"]).history(tail=1)) == ["trainer: 2026-01-01 10:00:02,000 INFO c"]
    assert Reader(directory, []).history(tail=0) == []


def test_a_log_that_is_long_is_emptied_under_its_writer_and_three_older_ones_are_kept(directory):
    path = directory / "logs/trainer.log"
    with path.open("a") as writer:
        for number in range(6):
            writer.write(f"line {number}\n")
            writer.flush()
            rotate(path, max_bytes=5)
        writer.write("last\n")
    assert path.read_text() == "last\n"
    assert [(directory / f"logs/trainer.log.{i}").read_text() for i in (1, 2, 3)] == [
        "line 5\n",
        "line 4\n",
        "line 3\n",
    ]
    assert len(list(path.parent.iterdir())) == 4
    assert texts(Reader(directory, []).history()) == [
        f"trainer: {text}" for text in ("line 3", "line 4", "line 5", "last")
    ]
    rotate(path, max_bytes=5)
    assert path.read_text() == "last\n", "not longer than that"


def test_nothing_is_lost_to_a_reader_when_a_log_is_rotated(directory):
    write(directory, "trainer", "one", "two")
    reader = Reader(directory, ["trainer"])
    assert texts(reader.history()) == ["trainer: one", "trainer: two"]
    write(directory, "trainer", "three")
    rotate(directory / "logs/trainer.log", max_bytes=1)
    write(directory, "trainer", "four")
    assert texts(reader.follow(lambda: False)) == ["trainer: three", "trainer: four"]


def test_following_ends_with_the_run_and_shows_parts_that_came_later(directory, monkeypatch):
    write(directory, "trainer", "one")
    reader = Reader(directory, [])
    reader.history()
    steps = iter(["trainer", "runner", None])
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)

    def going_on():
        part = next(steps)
        if part is not None:
            write(directory, part, "news")
        return part is not None

    assert texts(reader.follow(going_on)) == ["trainer: news", "runner: news"]


def test_half_a_line_waits_for_its_end(directory):
    (directory / "logs/trainer.log").write_text("half")
    reader = Reader(directory, [])
    assert reader.history() == []
    write(directory, "trainer", " done")
    assert texts(reader.history()) == ["trainer: half done"]


def test_a_part_without_a_log_is_refused_by_name(directory):
    write(directory, "trainer", "one")
    assert logs.chosen(directory, []) == ["trainer"]
    with pytest.raises(CliError, match=r"there is no log of 'tariner' in .*/logs; name one of trainer"):
        logs.chosen(directory, ["tariner"])


def test_runs_and_parts_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complete_runs("") == complete_parts("") == []
    for run in ("sums", "sorting"):
        (tmp_path / "runs" / run / "logs").mkdir(parents=True)
        (tmp_path / "runs" / run / "job.json").touch()
        (tmp_path / "runs" / run / "logs/trainer.log").touch()
    assert complete_runs("so") == ["sorting"]
    assert complete_parts("") == ["sorting", "sums", "trainer"]
    assert complete_parts("t") == ["trainer"]


def test_a_log_that_cannot_be_copied_for_want_of_room_leaves_the_older_ones(directory, monkeypatch):
    path = directory / "logs/trainer.log"
    path.write_text("first\n")
    rotate(path, max_bytes=1)
    path.write_text("second\n")

    def full(source, target):
        target.write_text("sec")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        rotate(path, max_bytes=1)
    assert {file.name: file.read_text() for file in (directory / "logs").iterdir()} == {
        "trainer.log": "second\n",
        "trainer.log.1": "first\n",
    }
