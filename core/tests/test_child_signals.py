"""Signals to processes of asyncio leave the exit code to the event loop."""

import asyncio
import signal
import sys

from rljob.protocol.child_signals import signal_child


async def test_a_signal_does_not_poll_the_process(monkeypatch):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    popen = process._transport.get_extra_info("subprocess")
    monkeypatch.setattr(popen, "poll", lambda: 1 / 0)
    signal_child(process, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM


async def test_a_process_that_has_ended_gets_no_signal(monkeypatch):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    monkeypatch.setattr("os.kill", lambda *_: 1 / 0)
    signal_child(process, signal.SIGKILL)
    assert process.returncode == 0
