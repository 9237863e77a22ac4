"""A process touches its heartbeat only while its event loop runs."""

import asyncio

from rljob.protocol import heartbeat
from rljob.protocol.health_probe import HEARTBEAT


async def test_the_file_is_touched_while_the_loop_runs(tmp_path, monkeypatch):
    path = tmp_path / "heartbeat"
    monkeypatch.setenv(HEARTBEAT, str(path))
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.001)
    with heartbeat.beating():
        while not path.exists():
            await asyncio.sleep(0)
        first = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == first:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "the heartbeat task has ended"


async def test_a_file_that_cannot_be_touched_is_logged_once_and_raises_no_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "none" / "heartbeat"))
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.0)
    with heartbeat.beating():
        for _ in range(10):
            await asyncio.sleep(0)
    assert len(caplog.records) == 1


async def test_without_the_variable_nothing_is_done(monkeypatch):
    monkeypatch.delenv(HEARTBEAT, raising=False)
    with heartbeat.beating():
        assert len(asyncio.all_tasks()) == 1
