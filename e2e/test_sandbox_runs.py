"""What a run in the sandbox of the reward ``code`` has of Python, although the zygote does only once what it can."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from rljob.rewards.sandbox.code_sandbox import CodeSandbox, Limits, SampleTime, SandboxRun, StarvedError
from rljob.rewards.sandbox.isolation import Isolation, find_isolation


@pytest.fixture(scope="module", params=["all layers", "limits"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[CodeSandbox]:
    layers = find_isolation() if request.param == "all layers" else Isolation({}, {})
    box = CodeSandbox(layers, Limits(seconds=10))
    yield box
    box.close()


def run(box: CodeSandbox, source: str, stdin: bytes = b"") -> SandboxRun:
    return box.run_program(source.encode(), stdin, 1 << 16)


def test_each_run_has_its_own_random_numbers(sandbox: CodeSandbox) -> None:
    source = "import random\nprint(random.random(), random.getrandbits(64))"
    assert len({run(sandbox, source).output for _ in range(5)}) == 5


def test_the_zygote_leaves_no_output_and_no_name_of_its_rehearsal(sandbox: CodeSandbox) -> None:
    given = run(sandbox, "import __main__\nprint(sorted(vars(__main__)), 'double' in vars(__main__))", b"1 2\n")
    assert given.output.endswith(b"False\n") and given.output.count(b"\n") == 1


def test_a_program_reads_all_its_input(sandbox: CodeSandbox) -> None:
    source = "import sys\nprint(input())\nprint(next(sys.stdin), end='')\nprint(sys.stdin.read())"
    assert run(sandbox, source, b"1\n2\n3\n4").output == b"1\n2\n3\n4\n"


def test_threads_are_joined_at_the_end(sandbox: CodeSandbox) -> None:
    source = """
import threading, time
lock = threading.Condition()
def work(number):
    time.sleep(0.05)
    with lock:
        print(number, flush=True)
for number in range(4): threading.Thread(target=work, args=[number]).start()
assert threading.main_thread() is threading.current_thread() and len(threading.enumerate()) == 5
"""
    given = run(sandbox, source)
    assert sorted(given.output.split()) == [b"0", b"1", b"2", b"3"] and given.ok


def test_the_environment_is_empty(sandbox: CodeSandbox) -> None:
    source = "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\n"
    source += "print(dict(os.environ), libc.getenv(b'LD_BIND_NOW'))"
    assert run(sandbox, source).output == b"{} None\n"


def test_a_program_that_may_fork_keeps_its_threads_apart_from_those_of_its_children() -> None:
    source = """
import os, threading, time
threading.Thread(target=time.sleep, args=[0.3]).start()
if pid := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    os._exit(len(threading.enumerate()))
"""
    box = CodeSandbox(Isolation({}, {}), Limits(seconds=10))
    try:
        assert run(box, source).output == b"1\n"
    finally:
        box.close()


def test_a_run_ends_at_the_end_of_its_samples_time_if_the_sample_has_waited_for_a_cpu(sandbox: CodeSandbox) -> None:
    with pytest.raises(StarvedError):
        sandbox.run_program(b"import time\ntime.sleep(600)", b"", 100, SampleTime(0.0, 0.0, waited=1e9))
    given = sandbox.run_program(b"import time\ntime.sleep(0.3)\nprint(7)", b"", 100, SampleTime(0.0, 0.0))
    assert given.output == b"7\n" and given.ok
    assert 0 <= given.waited < 100
    assert run(sandbox, "print(8)").output == b"8\n", "the next run is served"


def test_the_zygote_does_not_import_threading() -> None:
    """Its hook runs after each fork: a run took a tenth more of CPU time."""
    check = "import sys, rljob.rewards.sandbox.zygote; sys.exit('threading' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
