"""metrics.jsonl and event files: each step once despite kills, torn files and a full disk."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import logging
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from world import job

from rljob.coordinator import tracking as tracking_module
from rljob.coordinator.event_file import record
from rljob.coordinator.status_report import MOST_POINTS, thinned
from rljob.coordinator.tracking import TrackingWriter, finish, follow
from rljob.protocol.run_status import HistoryPoint

STEPS = 6
JOB = job(steps=STEPS, evaluation={"problems": 3, "everySteps": 2})


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def check_each_once(directory: Path) -> None:
    written = lines(directory)
    assert [line["step"] for line in written if line["kind"] == "step"] == list(range(STEPS))
    assert [line["version"] for line in written if line["kind"] == "evaluation"] == [0, 2, 4, 6]
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(STEPS))
    assert [event.step for event in events.Scalars("evaluation/sums/accuracy")] == [0, 2, 4, 6]
    by_step = {line["step"]: line["reward/mean"] for line in written if line["kind"] == "step"}
    assert {event.step: event.value for event in events.Scalars("reward/mean")} == by_step


async def finished(new_world: Any, directory: Path) -> None:
    """Run a job to its end and leave its ledger."""
    world = new_world(JOB, directory)
    await world.start()
    world.connect_all()
    await world.settle()


@pytest.mark.parametrize("every", [1, 2, 5, 11, 1000])
async def test_each_step_and_evaluation_is_written_once_whenever_the_coordinator_dies(
    new_world: Any, tmp_path: Path, every: int
) -> None:
    world = new_world(JOB, tmp_path)
    await world.start()
    world.connect_all()
    files = TrackingWriter(tmp_path, tensorboard=True)
    for turn in range(150):
        await world.some(1)
        files.write()
        if turn % every == every - 1:
            world.kill_coordinator()  # the files keep what was flushed
            files.close()
            files = TrackingWriter(tmp_path, tensorboard=True)
            await world.start()
            world.connect_all()
            await world.some(6)
    await world.settle()
    finish(files)
    assert world.run.finished
    check_each_once(tmp_path)


@pytest.mark.parametrize("torn", [b"", b'{"kind":"step","st', b"\0" * 5000, b"\n{}\n"])
@pytest.mark.parametrize("kept", [0, 1, 700, 1500, -1, None])
async def test_a_truncated_or_torn_file_is_completed(
    new_world: Any, tmp_path: Path, kept: int | None, torn: bytes
) -> None:
    await finished(new_world, tmp_path)
    finish(TrackingWriter(tmp_path, tensorboard=True))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept] + torn)
    finish(TrackingWriter(tmp_path, tensorboard=True))
    assert path.read_bytes() == whole
    check_each_once(tmp_path)


async def test_nothing_is_written_again_when_nothing_is_missing(new_world: Any, tmp_path: Path) -> None:
    await finished(new_world, tmp_path)
    for _ in range(3):
        finish(TrackingWriter(tmp_path, tensorboard=True))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    check_each_once(tmp_path)


async def test_a_full_disk_is_retried_and_logged_once(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await finished(new_world, tmp_path)
    tries = 0

    class Full:
        """A file with space for half a line."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.file.close()

    def open_(tracking: TrackingWriter) -> Any:
        nonlocal tries
        tries += 1
        return Full(opened(tracking)) if tries < 4 else opened(tracking)

    opened = TrackingWriter._open
    monkeypatch.setattr(TrackingWriter, "_open", open_)
    monkeypatch.setattr(tracking_module, "RETRY_SECONDS", 0)
    files = TrackingWriter(tmp_path, tensorboard=True)
    following = asyncio.create_task(follow(files))
    while not (tmp_path / "metrics.jsonl").exists() or len(lines_or_none(tmp_path)) < STEPS + 4:
        await asyncio.sleep(0)
    following.cancel()
    finish(files)
    check_each_once(tmp_path)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warnings if "No space left" in text]) == 1


def lines_or_none(directory: Path) -> list[bytes]:
    return (directory / "metrics.jsonl").read_bytes().splitlines()


async def test_the_metrics_are_those_of_the_samples(new_world: Any, tmp_path: Path) -> None:
    world = new_world(JOB, tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    finish(TrackingWriter(tmp_path, tensorboard=False))
    assert not (tmp_path / "tensorboard").exists()
    line = next(line for line in lines(tmp_path) if line.get("step") == 3)
    samples = world.store.query("SELECT * FROM samples WHERE step = 3")
    rewards = [row["reward"] for row in samples]
    ages = [3 - row["min_version"] for row in samples]
    assert line["samples"] == len(samples) == 4
    assert line["reward/mean"] == line["reward/sums/mean"] == statistics.fmean(rewards)
    assert line["reward/std"] == statistics.pstdev(rewards)
    assert (line["reward/min"], line["reward/max"]) == (min(rewards), max(rewards))
    assert line["response_length/max"] == max(row["response_tokens"] for row in samples)
    assert (line["prompt_length/mean"], line["response_length/truncated_fraction"]) == (3, 0)
    assert (line["staleness/mean"], line["staleness/max"]) == (statistics.fmean(ages), max(ages))
    histogram = {name: value for name, value in line.items() if name.startswith("staleness/samples/")}
    assert histogram == {f"staleness/samples/{age}": ages.count(age) for age in range(max(ages) + 1)}
    assert line["version/lowest"] == min(row["min_version"] for row in samples)
    assert line["trainer/loss"] == 0.0 and line["run/checkpoint"] == 2
    assert (line["dispatch/members_at_home"], line["dispatch/turns_at_home"]) == (1, 1), "there is one engine"
    assert (line["weights/update_seconds"], line["weights/pause_seconds"]) == (pytest.approx(0.1), 0)
    known = {"tokens_per_second", "seconds", "seconds/training", "seconds/weight_updates", "queue/waiting"}
    assert known | {f"ended/{end}" for end in ("filtered", "surplus", "expired", "failed")} <= line.keys()


def test_the_status_carries_few_points_and_always_the_newest() -> None:
    for count in (0, 1, 2, MOST_POINTS, MOST_POINTS + 1, 5000, 100_000):
        points = [HistoryPoint(step, 0.0, 0.0, 0.0, 0.0) for step in range(count)]
        kept = [point.step for point in thinned(points)]
        assert len(kept) == count if count < MOST_POINTS else MOST_POINTS / 2 <= len(kept) <= MOST_POINTS
        assert kept[-1:] == [point.step for point in points[-1:]]
        gaps = {b - a for a, b in itertools.pairwise(kept[:-1])}
        assert len(gaps) <= 1, "thinned evenly"


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256)) * 4])
def test_records_of_event_files_are_those_of_tensorboard(data: bytes) -> None:
    written = io.BytesIO()
    RecordWriter(written).write(data)
    assert record(data) == written.getvalue()


def test_event_files_need_no_numpy() -> None:
    program = "import sys; import rljob.coordinator.event_file; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
