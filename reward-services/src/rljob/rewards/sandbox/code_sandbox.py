"""Runs programs in confined processes that a zygote forks; compares nothing and trusts nothing that they say.

One sandbox belongs to one worker of the reward service, which calls it for one run at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob.rewards.sandbox import isolation
from rljob.rewards.sandbox.isolation import BUBBLEWRAP, LANDLOCK, SECCOMP, Isolation
from rljob.rewards.sandbox.run_watch import MAX_WAITING, STARVED
from rljob.rewards.sandbox.zygote import MAX_REQUEST

START_SECONDS = 60.0
GRACE_SECONDS = 10.0
"""Time after the last limit of a run in which the zygote must have answered; else it is replaced."""
WALL_FACTOR, WALL_SECONDS = 2.0, 0.5
MEMORY_FILE_SYSTEM = "/dev/shm"
PYTEST_BYTES = 4 << 20
"""Bytes of the files of a run of pytest: the file with the tests, and what the tests write."""
_READ_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_START = (
    "import sys; sys.path.append(sys.argv[1]); from rljob.rewards.sandbox.zygote import main; sys.path.pop(); "
    "main(sys.argv[2])"
)


class SandboxError(Exception):
    """A run could not be made: the error of this machine, not of the program."""


class StarvedError(SandboxError):
    """The machine had no CPU for a run until the run was ended. It says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of a process of a run.

    ``seconds``: of CPU. ``memory_bytes``: of address space. ``file_bytes``: of all files together; 0: the program
    cannot make any. ``wall_seconds``: of the clock, for programs that sleep; 0: twice ``seconds`` and a half. The time
    in which a process waits for a CPU does not count. A run that waits MAX_WAITING times the limit has no result.
    """

    seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 0
    wall_seconds: float = 0.0

    @property
    def clock(self) -> float:
        """Seconds of the clock."""
        return self.wall_seconds or WALL_FACTOR * self.seconds + WALL_SECONDS


@dataclass(frozen=True)
class SandboxRun:
    """What a run has left: the bytes that it wrote, the wait status of its first process.

    ``why``: the reason for which it was ended: time, output, threads, files; empty: it ended by itself, or the kernel
    ended it. ``seconds``: for which its processes used a CPU, or slept. ``waited``: for which they waited for a CPU, if
    that was long.
    """

    output: bytes
    status: int
    why: str
    seconds: float
    waited: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the process ended by itself with exit code 0. Says nothing about what it was to do."""
        return self.status == 0 and not self.why


@dataclass(frozen=True)
class SampleTime:
    """The time of the sample that a run belongs to.

    ``start``: of the sample, by time.monotonic. ``seconds``: after which a run is ended if the sample has waited for a
    CPU for most of them. ``waited``: seconds for which earlier runs of the sample waited.
    """

    start: float = 0.0
    seconds: float = math.inf
    waited: float = 0.0


NO_LIMIT = SampleTime()


class CodeSandbox:
    """The zygote of a worker; started by the first run, and again if it has ended.

    Args:
        layers: that are present.
        limits: of each process.
        pytest: whether the zygote loads pytest, for runs of its files.
    """

    def __init__(self, layers: Isolation, limits: Limits, pytest: bool = False) -> None:
        self._layers = layers.present
        self._limits = limits
        self._pytest = pytest
        self._zygote: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._directory = ""

    def run_program(self, source: bytes, stdin: bytes, max_output: int, sample: SampleTime = NO_LIMIT) -> SandboxRun:
        """Run a program with ``stdin``; it is ended when it writes more than ``max_output`` bytes.

        Raises:
            SandboxError: the run could not be made.
            StarvedError: it, or its sample, got no CPU.
        """
        process = self._process("program", {"3": 0, "0": 1, "1": 2}, self._limits.file_bytes)
        with contextlib.ExitStack() as stack:
            files = [_sealed(stack, source), _sealed(stack, stdin)]
            return self._run([process], stack, files, 2, max_output, sample)

    def run_tests(
        self,
        source: bytes,
        tests: bytes,
        role: str,
        module: str,
        max_output: int = 4096,
        sample: SampleTime = NO_LIMIT,
    ) -> SandboxRun:
        """Run tests in one process, and the program whose functions they call, as ``module``, in another one.

        Args:
            source: of the program.
            tests: a block of Python, or a file of pytest.
            role: asserts or pytest.
            module: name by which the tests import the program.
            max_output: bytes of the report.
            sample: time of the sample.

        Returns:
            The run of the tests. Its output, which the program cannot reach, is [tests, tests that passed] as JSON.

        Raises:
            SandboxError: the run could not be made.
            StarvedError: it, or its sample, got no CPU.
        """
        arguments = {"module": module}
        file_bytes = PYTEST_BYTES if role == "pytest" else 0
        judge = self._process(role, {"3": 0, "0": 4, "1": 5, "4": 2}, file_bytes) | {"arguments": arguments}
        program = self._process("functions", {"3": 1, "0": 4, "1": 4, "4": 3}, 0) | {"arguments": arguments}
        with contextlib.ExitStack() as stack:
            files = [_sealed(stack, tests), _sealed(stack, source)]
            channel = [stack.enter_context(end) for end in socket.socketpair()]
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, null)
            files += [*(end.fileno() for end in channel), null]
            return self._run([judge, program], stack, files, 5, max_output, sample)

    def close(self) -> None:
        """End the zygote and what it runs; remove its directory."""
        if self._zygote is not None and self._owner == os.getpid():
            self._connection.close()
            self._zygote.kill()
            self._zygote.wait()
        self._zygote = None
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)  # the zygote has emptied it
            self._directory = ""

    def _process(self, role: str, descriptors: dict[str, int], file_bytes: int) -> dict[str, Any]:
        limits = {"memory": self._limits.memory_bytes, "files": file_bytes, "cpu": self._limits.seconds}
        files = file_bytes > 0
        return {"role": role, "descriptors": descriptors, "limits": limits, "files": files, "arguments": {}}

    def _run(
        self,
        processes: list[dict[str, Any]],
        stack: contextlib.ExitStack,
        files: list[int],
        output: int,
        limit: int,
        sample: SampleTime,
    ) -> SandboxRun:
        """Give the zygote a run whose output is descriptor ``output`` of ``files``; read it until the run has ended.

        ``stack`` closes the files here once the zygote has them: a process of the run must see when the other one ends.
        """
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        files.insert(output, writer)
        request = json.dumps({"processes": processes, "seconds": self._limits.clock}).encode()
        try:
            try:
                self._start()
                socket.send_fds(self._connection, [request], files)
            except OSError as error:
                self.close()
                raise SandboxError(f"the sandbox cannot start a run: {error}") from error
            finally:
                os.close(writer)
                stack.close()
            return self._read(reader, limit, sample)
        finally:
            os.close(reader)

    def _read(self, reader: int, limit: int, sample: SampleTime) -> SandboxRun:
        """Read the output until the zygote answers: the end of a run is the end of its process, not of its output."""
        output, why = bytearray(), ""
        began = time.monotonic()
        deadline, late = began + self._limits.clock * (1 + MAX_WAITING) + GRACE_SECONDS, sample.start + sample.seconds
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        waiting.register(reader, select.POLLIN)
        answered, reading = False, True
        while not answered:
            left = min(deadline, late) - time.monotonic()
            ready = {descriptor for descriptor, _ in waiting.poll(1000 * max(0.0, left))}
            if not ready and late < deadline:
                late = math.inf
                self._send(f"late {sample.waited} {time.monotonic() - sample.start}")
                continue
            if not ready:
                self.close()
                raise SandboxError("the zygote of the sandbox does not answer")
            answered = self._connection.fileno() in ready
            if not reading or not (answered or reader in ready):
                continue
            reading = _read_available(reader, output, limit)
            if not reading:
                waiting.unregister(reader)
            if len(output) > limit:
                why = "output"
                self._send("end")
        answer = self._answer()
        seconds = sum(seconds for _, seconds in answer["ends"])
        if answer["why"] == STARVED:
            passed = time.monotonic() - began
            raise StarvedError(f"the machine is too busy: a run had {seconds:.3g} s of a CPU in {passed:.3g} s")
        status = answer["ends"][0][0]
        return SandboxRun(bytes(output), status, why or answer["why"], seconds + answer["slept"], answer["waited"])

    def _send(self, message: str) -> None:
        """Send the zygote a message about the present run."""
        with contextlib.suppress(OSError):  # it has ended, which its answer shows
            self._connection.send(message.encode())

    def _answer(self) -> dict[str, Any]:
        """Return the zygote's answer to a run.

        Raises:
            SandboxError: there is no run, or no zygote.
        """
        try:
            answer: dict[str, Any] = json.loads(
                self._connection.recv(MAX_REQUEST) or b'{"error": "the zygote has ended"}'
            )
        except OSError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            self.close()
            raise SandboxError(f"the sandbox cannot make a run: {answer['error']}")
        return answer

    def _start(self) -> None:
        """Start the zygote unless it is running.

        Raises:
            OSError: it does not start.
        """
        if self._zygote is not None and self._owner == os.getpid() and self._zygote.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = self._command(theirs.fileno())
            self._zygote = subprocess.Popen(
                command, env=isolation.ZYGOTE_ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._connection, self._owner = ours, os.getpid()
        ours.settimeout(START_SECONDS)
        if not ours.recv(MAX_REQUEST):
            raise OSError("the zygote ends at its start; its error is in the log")
        ours.settimeout(None)

    def _command(self, descriptor: int) -> list[str]:
        packages = [_site_of("pytest")] if self._pytest else []
        read = isolation.readable_paths(packages)
        scratch_bytes = max(self._limits.file_bytes, PYTEST_BYTES if self._pytest else 0)
        words, scratch = [], ""
        if BUBBLEWRAP in self._layers:
            words = isolation.bubblewrap_command(read, scratch_bytes)
            scratch = isolation.PRIVATE_TMP if scratch_bytes else ""
        elif scratch_bytes:
            scratch = self._directory = tempfile.mkdtemp(prefix="rljob-sandbox-", dir=MEMORY_FILE_SYSTEM)
        config = {
            "socket": descriptor,
            "read": read if LANDLOCK in self._layers else None,
            "scratch": scratch,
            "filtered": SECCOMP in self._layers,
            "modules": ["pytest"] if self._pytest else [],
            "path": packages,
        }
        interpreter = os.path.realpath(sys.executable)
        return [*words, interpreter, "-ISEB", "-X", "utf8", "-c", _START, str(isolation.ROOT), json.dumps(config)]


def _sealed(stack: contextlib.ExitStack, content: bytes) -> int:
    """Return the descriptor of a sealed file in memory, positioned at its beginning."""
    file = os.memfd_create("run", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, file)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def _read_available(reader: int, output: bytearray, limit: int) -> bool:
    """Append what can be read, at most a block more than ``limit`` bytes; return whether to read more later."""
    while len(output) <= limit:
        try:
            part = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return True
        if not part:
            return False
        output += part
    return False


def _site_of(package: str) -> str:
    """Return the folder in which a package is installed.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(errno.ENOENT, f"the package {package} is not installed")
    return str(Path(spec.origin).parents[1])
