"""Temporary directories of servers whose agent was killed."""

import os
import signal
import sys
import tempfile
from subprocess import PIPE, Popen

import pytest

from rljob.rollout import server_shared_memory, temp_dirs
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
SEMAPHORE = """
import sys
from multiprocessing import get_context
lock = get_context("spawn").Lock()
print("sem." + lock._semlock.name.lstrip("/"), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("program", [SEGMENT, SEMAPHORE], ids=["segment", "semaphore"])
@pytest.mark.parametrize("removed_by", ["the owner", "the next start"])
async def test_shared_memory_of_a_killed_server_is_removed_and_that_of_others_is_not(removed_by, program):
    def start():
        return Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True, start_new_session=True)

    directory = ServerTempDir()
    with start() as server, start() as other:
        name, of_other = (server_shared_memory.DIRECTORY / each.stdout.readline().strip() for each in (server, other))
        await directory.note_shared_memory(server.pid)
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


MAPS = """
import mmap, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("mapped", flush=True)
sys.stdin.read()
"""


def start_with(*paths):
    command = [sys.executable, "-c", MAPS, *map(str, paths)]
    process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "mapped\n"
    return process


@pytest.fixture
def segment():
    """Return a function that makes a file below /dev/shm."""
    made = []

    def make(name):
        made.append(server_shared_memory.DIRECTORY / f"rljob-test-{os.getpid()}-{name}")
        made[-1].write_bytes(b"content")
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


async def test_files_that_others_made_or_use_stay(temporary, segment):
    earlier = segment("earlier")
    directory = ServerTempDir()
    own, shared = segment("own"), segment("shared")
    with start_with(earlier, own, shared) as server, start_with(shared) as other:
        await directory.note_shared_memory(server.pid)
        directory.remove()
        for each in (server, other):
            os.killpg(each.pid, signal.SIGKILL)
    assert earlier.exists() and shared.exists() and not own.exists()


async def test_what_a_dying_server_still_uses_is_removed_at_a_later_start(temporary, segment):
    directory = ServerTempDir()
    found = segment("found")
    with start_with(found) as server:
        await directory.note_shared_memory(server.pid)
        make_old(directory.path)
        directory._lock.close()
        remove_orphans()
        assert found.exists() and directory.path.exists()
        os.killpg(server.pid, signal.SIGKILL)
    remove_orphans()
    assert not found.exists() and not directory.path.exists()


async def test_a_file_of_another_user_stays(temporary, segment, monkeypatch):
    directory = ServerTempDir()
    found = segment("found")
    with start_with(found) as server:
        await directory.note_shared_memory(server.pid)
        os.killpg(server.pid, signal.SIGKILL)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    directory.remove()
    assert found.exists() and not directory.path.exists()


@pytest.mark.parametrize("of_this_user", [True, False])
def test_a_list_removes_only_files_of_its_user_below_dev_shm(temporary, segment, tmp_path, monkeypatch, of_this_user):
    found, elsewhere = segment("found"), tmp_path / "file"
    elsewhere.touch()
    directory = ServerTempDir()
    (directory.path / temp_dirs.SHARED_MEMORY).write_text(f"{found.name}\n{elsewhere}\n../..{elsewhere}\n")
    make_old(directory.path)
    directory._lock.close()
    if not of_this_user:
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    remove_orphans()
    assert elsewhere.exists()
    assert found.exists() == directory.path.exists() == (not of_this_user)
