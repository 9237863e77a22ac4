"""The engine's server process, with small Python programs as servers."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from rljob.rollout import supervisor
from rljob.rollout.adapters.base import Launch
from rljob.rollout.exit_diagnosis import first_error
from rljob.rollout.supervisor import EngineProcess, EngineStartError

SLEEPER = "import subprocess, sys, time; subprocess.Popen(['sleep', '99']); print('ready', flush=True); time.sleep(99)"


class FakeAdapter:
    """Starts a Python program; its client is healthy once ``is_healthy`` is set."""

    def __init__(self, program, environment=None):
        self.program, self.environment = program, environment or {}
        self.is_healthy = False

    def launch(self, port, key):
        return Launch([sys.executable, "-S", "-c", self.program], self.environment)

    def connect(self, port, key):
        return self

    def find_error(self, lines):
        return first_error(lines)

    async def healthy(self):
        return self.is_healthy

    async def close(self):
        pass


async def test_a_server_that_does_not_start_is_reported_with_its_last_lines():
    program = "import sys; [print('line', i) for i in range(100)]; sys.exit('no such model')"
    engine = await EngineProcess.start(FakeAdapter(program))
    with pytest.raises(EngineStartError, match="exited with code 1") as failure:
        await engine.wait_healthy()
    assert failure.value.last_lines.endswith("line 99\nno such model")
    assert "line 3\n" not in failure.value.last_lines
    assert not failure.value.permanent
    await engine.kill()


@pytest.mark.parametrize("out_of_memory", [False, True])
async def test_a_server_that_someone_kills_while_it_starts_was_killed(monkeypatch, out_of_memory):
    engine = await EngineProcess.start(FakeAdapter("import os; os.kill(os.getpid(), 9)"))
    engine._oom_kills -= out_of_memory
    with pytest.raises(EngineStartError, match="SIGKILL") as failure:
        await engine.wait_healthy()
    assert failure.value.killed == (not out_of_memory) and not failure.value.permanent
    await engine.kill()


async def test_a_server_that_refuses_its_settings_fails_permanently_with_its_error():
    engine = await EngineProcess.start(FakeAdapter("import sys; print('serve.py: error: no --foo'); sys.exit(2)"))
    with pytest.raises(EngineStartError, match=r"exited with code 2: no --foo") as failure:
        await engine.wait_healthy()
    assert failure.value.permanent
    await engine.kill()


async def test_an_old_error_does_not_explain_the_end_of_a_server(monkeypatch):
    program = (
        "import sys; print('ValueError: a bad request', flush=True); sys.stdin.read(); __import__('time').sleep(99)"
    )
    adapter = FakeAdapter(program)
    adapter.is_healthy = True
    engine = await EngineProcess.start(adapter)
    await engine.wait_healthy()
    while not engine.last_lines():
        await asyncio.sleep(0.005)
    assert engine.explain("it ended") == "it ended: ValueError: a bad request"
    monkeypatch.setattr(supervisor, "FINAL_SECONDS", 0.0)
    assert engine.explain("it ended") == "it ended"
    await engine.kill()


async def test_a_full_disk_under_the_log_does_not_stop_the_server(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor.sys, "stderr", Full())
    engine = await EngineProcess.start(FakeAdapter("[print('x' * 1000) for _ in range(1000)]"))
    assert await asyncio.wait_for(engine.wait_ended(), 60) == "the engine server exited with code 0"
    await engine.kill()


async def test_killing_a_server_kills_all_its_processes(capfd):
    adapter = FakeAdapter(SLEEPER)
    engine = await EngineProcess.start(adapter)
    server = psutil.Process(engine.pid)
    while not server.children():
        await asyncio.sleep(0.005)
    family = [server, *server.children()]
    adapter.is_healthy = True
    await engine.wait_healthy()
    while "ready" not in engine.last_lines():
        await asyncio.sleep(0.005)
    await engine.kill()
    assert await engine.wait_ended() == "the engine server was killed by SIGKILL"
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert "ready" in capfd.readouterr().err  # its output is forwarded


@pytest.mark.parametrize("blocked", [True, False])
async def test_a_server_is_killed_also_if_its_shared_memory_cannot_be_looked_at(monkeypatch, caplog, blocked):
    engine = await EngineProcess.start(FakeAdapter(SLEEPER))
    server = psutil.Process(engine.pid)

    async def look(group):
        if blocked:
            await asyncio.Event().wait()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine._temp_dir, "note_shared_memory", look)
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.01)
    await engine.kill()
    assert not psutil.wait_procs([server], timeout=60)[1]
    assert ("took 0.01 s" if blocked else "can't start new thread") in caplog.text


MAKES_SHARED_MEMORY = """
import mmap, time
file = open("/dev/shm/NAME", "w+b")
file.write(b"content")
file.flush()
mapped = mmap.mmap(file.fileno(), 0)
print("made", flush=True)
time.sleep(99)
"""


async def test_shared_memory_that_a_server_made_late_is_removed_if_the_server_is_killed(monkeypatch):
    """It is known by a look at the running server: a killed one has nothing mapped any more."""
    monkeypatch.setattr(supervisor, "SHARED_MEMORY_SECONDS", 0.005)
    name = f"rljob-test-{os.getpid()}"
    engine = await EngineProcess.start(FakeAdapter(MAKES_SHARED_MEMORY.replace("NAME", name)))
    path = Path("/dev/shm", name)
    while name not in engine._temp_dir._noted:
        await asyncio.sleep(0.005)
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait_ended()
    assert path.exists()
    await engine.kill()
    assert not path.exists()


async def test_a_stopped_server_can_exit_by_itself():
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('up', flush=True)\n"
        "time.sleep(99)"
    )
    engine = await EngineProcess.start(FakeAdapter(program))
    while "up" not in engine.last_lines():
        await asyncio.sleep(0.005)
    await engine.stop()
    assert await engine.wait_ended() == "the engine server exited with code 0"


async def test_the_environment_and_temporary_directory_of_a_server(monkeypatch):
    monkeypatch.setenv("TAKEN_AWAY", "1")
    program = "import os; print(os.environ.get('TAKEN_AWAY'), os.environ['GIVEN'], os.environ['TMPDIR'])"
    engine = await EngineProcess.start(FakeAdapter(program, {"TAKEN_AWAY": None, "GIVEN": "2"}))
    await engine.wait_ended()
    with pytest.raises(EngineStartError):
        await engine.wait_healthy()
    taken, given, directory = engine.last_lines().split()
    assert (taken, given) == ("None", "2")
    assert os.path.isdir(directory)
    await engine.kill()
    assert not os.path.exists(directory)


async def test_a_missing_program_fails_permanently(monkeypatch):
    adapter = FakeAdapter("")
    monkeypatch.setattr(adapter, "launch", lambda port, key: Launch(["/no/such/program"], {}))
    with pytest.raises(EngineStartError, match=r"cannot be started: .*'/no/such/program'") as failure:
        await EngineProcess.start(adapter)
    assert failure.value.permanent


AGENT = """
import asyncio, sys, types
import uvloop
from rljob.rollout.adapters.base import Launch
from rljob.rollout.supervisor import EngineProcess

class Adapter:
    def launch(self, port, key):
        return Launch([sys.executable, "-S", "-c", "import time; time.sleep(99)"], {})
    def connect(self, port, key):
        return None

async def main():
    engine = await EngineProcess.start(Adapter())
    print(engine.pid, flush=True)
    await asyncio.sleep(99)

uvloop.run(main())
"""


async def test_any_server_dies_with_its_agent():
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, stdout=asyncio.subprocess.PIPE)
    server = psutil.Process(int(await agent.stdout.readline()))
    agent.kill()
    await agent.wait()
    assert not psutil.wait_procs([server], timeout=60)[1]
