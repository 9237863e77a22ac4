"""How SGLang's server reports that one of its processes was killed, with stand-ins for SGLang."""

import importlib
import os
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
