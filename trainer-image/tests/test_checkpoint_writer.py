"""The thread that writes checkpoints: one at a time, again while the disk is full; other errors end the process."""

import threading

import pytest
import torch

from rljob.trainer import checkpoint_writer
from rljob.trainer.checkpoint_writer import CheckpointWriter
from rljob.trainer.errors import NoRoomError, SupersededError
from rljob.trainer.process_group import World

ALONE = World(0, 1, torch.device("cpu"), None, 0, 1)  # type: ignore[arg-type]


class Recorded:
    """A writer and the calls of its callbacks."""

    def __init__(self):
        self.calls = []
        self.idle = threading.Event()
        self.writer = CheckpointWriter(ALONE, self.calls.append, self._fail, self.idle.set)

    def _fail(self, error):
        self.calls.append(error)
        self.idle.set()

    def write(self, step, write):
        self.writer.start(step, write, lambda: self.calls.append(f"done {step}"))


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "FIRST_RETRY_SECONDS", 1e-4)
    made = Recorded()
    yield made
    made.writer.close()


def test_the_caller_continues_while_a_checkpoint_is_written(recorded):
    may_write = threading.Event()
    recorded.write(2, may_write.wait)
    assert recorded.writer.step == 2 and not recorded.calls
    may_write.set()
    assert recorded.idle.wait(60)
    assert recorded.writer.step is None and recorded.calls == ["done 2"]


def test_a_write_to_a_full_disk_is_repeated_and_reported(recorded):
    left = ["full", "still full"]

    def write():
        if left:
            raise NoRoomError(left.pop(0))

    recorded.write(2, write)
    assert recorded.idle.wait(60)
    assert recorded.calls == ["full", "still full", "", "done 2"]


def test_the_end_of_the_trainer_ends_the_wait_for_room_and_waits_for_a_write(recorded, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "FIRST_RETRY_SECONDS", 1000.0)
    tried = threading.Event()

    def full():
        tried.set()
        raise NoRoomError("full")

    recorded.write(2, full)
    assert tried.wait(60)
    recorded.writer.close()
    assert recorded.writer.step is None and recorded.calls == ["full"]
    recorded.write(3, lambda: None)
    recorded.writer.close()
    assert recorded.calls == ["full", "done 3"]


def test_a_superseded_write_ends_quietly_and_another_error_reaches_the_main_thread(recorded, caplog):
    def superseded():
        raise SupersededError("incarnation 3 has taken over")

    recorded.write(2, superseded)
    assert recorded.idle.wait(60)
    assert recorded.writer.step is None and recorded.calls == []
    assert "the checkpoint of step 2 is not written: incarnation 3 has taken over" in caplog.text
    recorded.idle.clear()
    error = OSError(5, "Input/output error")

    def broken():
        raise error

    recorded.write(4, broken)
    assert recorded.idle.wait(60)
    assert recorded.calls == [error]
