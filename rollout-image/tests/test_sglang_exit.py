"""How SGLang's server reports that one of its processes was killed, with stand-ins for SGLang."""

import importlib
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rljob.protocol.exit_codes import FAILURE


@pytest.fixture
def module(monkeypatch):
    helpers = ModuleType("sglang.srt.utils")
    helpers.kill_process_tree = lambda pid, include_parent: None
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    yield importlib.import_module("rljob.rollout.adapters.sglang.sglang_exit")
    del sys.modules["rljob.rollout.adapters.sglang.sglang_exit"]


def ended(code):
    """Return a process that ended."""
    read, write = os.pipe()
    os.close(write)
    return SimpleNamespace(sentinel=read, exitcode=code, pid=7)


def test_a_killed_process_is_named_before_the_server_ends(module, monkeypatch, capfd):
    """The scheduler that waits for the killed one may fail before SGLang looks for killed processes."""
    processes = [ended(code) for code in (None, -9, 0, 1)]
    watchdog = SimpleNamespace(_processes=processes, _names=["scheduler_0", "scheduler_1", "detokenizer", "other"])
    arguments, handlers, codes = SimpleNamespace(), SimpleNamespace(), []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    monkeypatch.setattr(module, "silence", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda number, handler: None)
    module.end_at_failures(arguments, handlers)
    manager = SimpleNamespace(_subprocess_watchdog=watchdog)
    handlers.running_phase_sigquit_handler(SimpleNamespace(tokenizer_manager=manager))
    assert capfd.readouterr().err == "Subprocess scheduler_1 (pid=7) crashed with exit code -9\n"
    manager._subprocess_watchdog = None
    handlers.running_phase_sigquit_handler(SimpleNamespace(tokenizer_manager=manager))
    arguments.custom_sigquit_handler()
    assert codes == [FAILURE] * 3
    for process in processes:
        os.close(process.sentinel)


PROGRAM = """
import os, signal, sys
from types import ModuleType, SimpleNamespace
helpers = ModuleType("sglang.srt.utils")
def kill_process_tree(pid, include_parent):
    os.write(int(sys.argv[2]), b"x")
    sys.stderr.write("Subprocess scheduler_0 (pid=8) crashed with exit code -9\\n")  # as SGLang's thread does
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGQUIT)
    raise RuntimeError("not all processes have ended after 60 s")
helpers.kill_process_tree = kill_process_tree
sys.modules |= {"sglang": ModuleType("sglang"), "sglang.srt": ModuleType("sglang.srt"), helpers.__name__: helpers}
from rljob.rollout.adapters.sglang.sglang_exit import end_at_failures
arguments, handlers = SimpleNamespace(), SimpleNamespace()
end_at_failures(arguments, handlers)
manager = SimpleNamespace(tokenizer_manager=SimpleNamespace(_subprocess_watchdog=None))
if sys.argv[1] == "starts":
    signal.signal(signal.SIGQUIT, arguments.custom_sigquit_handler)
else:
    signal.signal(signal.SIGQUIT, lambda *arguments: handlers.running_phase_sigquit_handler(manager, *arguments))
print("out of memory", flush=True)
os.kill(os.getpid(), signal.SIGQUIT)
"""


@pytest.mark.parametrize("phase", ["starts", "runs"])
def test_processes_that_the_end_itself_kills_are_not_reported(phase):
    read, write = os.pipe()
    command = [sys.executable, "-c", PROGRAM, phase, str(write)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[write])
    os.close(write)
    with open(read, "rb") as calls:
        assert calls.read() == b"x"  # the second SIGQUIT is ignored
    assert (done.returncode, done.stdout, done.stderr) == (FAILURE, "out of memory\n", "")


def test_the_server_ends_although_the_killed_processes_cannot_be_named(module, monkeypatch):
    ends = []
    monkeypatch.setattr(module, "end_server", lambda: ends.append(True))
    monkeypatch.setattr(module.signal, "signal", lambda number, handler: None)
    handlers = SimpleNamespace()
    module.end_at_failures(SimpleNamespace(), handlers)
    broken = SimpleNamespace(_processes=[SimpleNamespace()], _names=["scheduler_0"])
    with pytest.raises(AttributeError):
        handlers.running_phase_sigquit_handler(
            SimpleNamespace(tokenizer_manager=SimpleNamespace(_subprocess_watchdog=broken))
        )
    assert ends
