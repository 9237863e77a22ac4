"""What a confined process does: run a program, serve the functions of a program, or run tests that call them.

The process of the tests holds no foreign code. It reaches the program through a channel that carries plain data, so the
program can neither see the tests nor touch what judges.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, TextIO

from rljob.rewards.sandbox.program_peer import ProgramPeer
from rljob.rewards.sandbox.remote_objects import TestsPeer, is_other_module

SOURCE, CHANNEL = 3, 4
REHEARSALS = 20
"""More than the calls after which Python specializes a function."""
_REHEARSED = b"""
import sys
try:
    print(*map(int, input().split()))
except EOFError:
    print(end="", flush=True)
def double(x: int) -> int:
    return 2 * x
class Empty:
    def __init__(self) -> None:
        self.values = {str(i): [double(i)] for i in range(3)}
for line in sys.stdin.read().splitlines(): pass
for value in sorted(Empty().values): f"{value}"
"""


def read_arguments(process: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a role. The source is read before the process is confined; its descriptor is closed."""
    source = os.pread(SOURCE, os.lseek(SOURCE, 0, os.SEEK_END), 0)
    os.close(SOURCE)
    arguments = {"source": source, **process["arguments"]}
    if process["files"]:
        os.environ["TMPDIR"] = os.getcwd()
    return arguments


def run_program(source: bytes) -> None:
    """Run a program as ``__main__``; its end is that of the process."""
    os.close(CHANNEL)
    _end(_execute(source, "__main__"))


def serve_functions(source: bytes, module: str) -> None:
    """Run a program as module ``module``, then do what the process of the tests asks for."""
    program = types.ModuleType(module)
    sys.modules[module] = program
    peer = ProgramPeer(CHANNEL, program)
    try:
        exec(compile(source, f"{module}.py", "exec", dont_inherit=True), program.__dict__)
    except BaseException as error:  # noqa: BLE001 the tests get it when they first ask for a name
        peer.failure = error
    peer.serve()


def run_asserts(source: bytes, module: str) -> None:
    """Run a block of Python, whose names are those of the program; report whether it ends without exception."""
    peer = TestsPeer(CHANNEL)
    sys.modules[module] = peer.module(module)
    found = {name: value for name, value in peer.names().items() if not is_other_module(value)}
    names: dict[str, Any] = {**found, "__name__": "tests", "__builtins__": builtins}
    sys.stdout = _nowhere()
    exec(compile(source, "tests.py", "exec", dont_inherit=True), names)
    _report(1, 1)


def run_pytest(source: bytes, module: str) -> None:
    """Run a file of pytest, in which module ``module`` stands for the program; report how many tests there are and
    how many passed."""
    pytest = importlib.import_module("pytest")  # which the zygote has loaded
    counts = {"collected": 0, "passed": 0}

    class Count:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            counts["collected"] = len(items)

        def pytest_runtest_logreport(self, report: Any) -> None:
            failed.add(report.nodeid) if report.outcome != "passed" else seen.add((report.nodeid, report.when))

    failed: set[str] = set()
    seen: set[tuple[str, str]] = set()
    sys.modules[module] = TestsPeer(CHANNEL).module(module)
    with open("test_program.py", "wb") as file:
        file.write(source)
    sys.stdout = sys.stderr = _nowhere()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = [
        "-c",
        os.devnull,
        "--rootdir=.",
        "--confcutdir=.",
        "--noconftest",
        "-s",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
    ]
    pytest.main([*options, "-p", "no:faulthandler", "-p", "no:junitxml", "test_program.py"], plugins=[Count()])
    counts["passed"] = len({node for node, when in seen if when == "call"} - failed)
    _report(counts["collected"], counts["passed"])


def rehearse() -> None:
    """Run a program in the zygote, whose input and output are empty, as a run does it.

    Python fills caches of types and specializes its code when it is first used. Done here, it is not done, and the
    memory not copied, in each run.
    """
    for _ in range(REHEARSALS):
        _execute(_REHEARSED, "__main__")
        _join_threads()
        sys.stdout.flush()


def _nowhere() -> TextIO:
    """Return a stream for what tests print; descriptor 1 is for the report."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _report(collected: int, passed: int) -> None:
    os.write(1, json.dumps([collected, passed]).encode())
    os._exit(0)


def _execute(source: bytes, name: str) -> int:
    """Run a program; return its exit code."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 whatever the program raises, it has failed
        return 1
    return 0


def _end(code: int) -> None:
    """End the process as Python ends: threads, functions of atexit, buffers."""
    _join_threads()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 the program may have put anything there
        code = code or 1
    os._exit(code & 255)


def _join_threads() -> None:
    threading = sys.modules.get("threading")  # the zygote imports it without its hooks of a fork
    if threading and threading.active_count() > 1:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()


ROLES: dict[str, Callable[..., None]] = {
    "program": run_program,
    "functions": serve_functions,
    "asserts": run_asserts,
    "pytest": run_pytest,
}
