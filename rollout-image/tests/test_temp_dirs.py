"""Temporary directories of servers whose agent was killed."""

import os
import tempfile

import pytest

from rljob.rollout import temp_dirs
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
