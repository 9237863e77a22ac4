"""Temporary directories of servers whose agent was killed."""

import os
import signal
import sys
import tempfile
from subprocess import PIPE, Popen

import pytest

from rljob.rollout import shared_memory, temp_dirs
from rljob.rollout.temp_dirs import ServerTempDir, remove_orphans


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_old(directory):
    os.utime(directory / temp_dirs.LOCK, (1, 1))


def test_a_directory_is_removed_by_its_owner_or_at_the_next_start(temporary):
    alive, dead, young = ServerTempDir(), ServerTempDir(), ServerTempDir()
    for owner in (dead, young):
        owner._lock.close()  # as the kernel does when a process dies
    make_old(alive.path)
    make_old(dead.path)
    (dead.path / "socket").touch()
    (temporary / "rljob-engine-other").mkdir()  # not ours: no lock in it
    remove_orphans()
    assert {path.name for path in temporary.iterdir()} == {alive.path.name, young.path.name, "rljob-engine-other"}
    alive.remove()
    assert not alive.path.exists()


SEGMENT = """
import sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 16)
print(memory.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("removed_by", ["the owner", "the next start"])
def test_shared_memory_of_a_killed_server_is_removed_and_that_of_others_is_not(removed_by):
    def start():
        return Popen([sys.executable, "-c", SEGMENT], stdin=PIPE, stdout=PIPE, text=True, start_new_session=True)

    with start() as server, start() as other:
        name, of_other = (shared_memory.DIRECTORY / each.stdout.readline().strip() for each in (server, other))
        directory = ServerTempDir()
        directory.note_shared_memory(server.pid)
        for each in (server, other):
            os.killpg(each.pid, signal.SIGKILL)
    assert name.exists() and of_other.exists()
    if removed_by == "the owner":
        directory.remove()
    else:
        directory._lock.close()
        make_old(directory.path)
        remove_orphans()
    assert not name.exists() and of_other.exists()
    of_other.unlink()
