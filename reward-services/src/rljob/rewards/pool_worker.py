"""The service's side of a worker process of the pool: its socket, its limit of time, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections import deque
from dataclasses import dataclass

import msgspec

from rljob.protocol.score_messages import MAX_SCORE_BYTES, Score
from rljob.rewards.orphans import kill_with_descendants
from rljob.rewards.worker import READY, Evaluator, fork_worker

GRACE_SECONDS = 0.05  # to read a score that arrived in time although the service was not scheduled
EXIT_SECONDS = 5.0  # for a worker's parent to end what the worker has started; then the service does it

_decoder = msgspec.json.Decoder(Score)


class WorkerError(Exception):
    """A worker is of no more use. The message continues "reward NAME: the worker …"."""


class WorkerExitedError(WorkerError):
    """The worker's process is gone."""


class SampleTimeoutError(WorkerError):
    """A sample exceeded its time limit."""


class StartError(Exception):
    """A worker cannot receive samples. The message continues "reward NAME: "."""


class SetUpError(StartError):
    """The set-up of a worker failed."""


@dataclass(eq=False)
class ScoreJob:
    """A sample that waits for its score."""

    sample: str
    text: bytes  # the item as JSON
    result: asyncio.Future[Score]
    tries: int = 0
    alone: bool = False  # not in a chunk with others: it, or a chunk that it was in, made a worker fail

    @property
    def digest(self) -> bytes:
        """Names the sample in later requests."""
        return hashlib.blake2b(self.text, digest_size=16).digest()


class PoolWorker:
    """A worker process and the samples that it has not answered yet.

    Args:
        evaluator: scores samples in the worker.
        seconds: limit for one sample.
        memory_bytes: limit of what the worker allocates; None: none.

    ``pid``: of the worker's parent.

    Raises:
        OSError: no process is left.
    """

    def __init__(self, evaluator: Evaluator, seconds: float, memory_bytes: int | None) -> None:
        self.pid, self._socket = fork_worker(evaluator, seconds, memory_bytes)
        self._writer: asyncio.StreamWriter | None = None
        self.chunk: deque[ScoreJob] = deque()

    async def connect(self) -> None:
        """Wait until the worker is set up and can receive samples.

        Raises:
            WorkerExitedError: it ended before.
            SetUpError: it could not be set up.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_SCORE_BYTES + 1)
        try:
            line = await self._reader.readuntil()
        except (ConnectionError, asyncio.IncompleteReadError):
            raise WorkerExitedError("exited") from None
        if line != READY:
            raise SetUpError(line.decode(errors="replace").strip())

    def give(self, chunk: deque[ScoreJob]) -> None:
        """Send the worker samples to score."""
        assert self._writer is not None
        self.chunk = chunk
        self._writer.write(b"[" + b",".join(job.text for job in chunk) + b"]\n")

    async def answer(self, seconds: float) -> Score:
        """Return the score of the first sample of the chunk.

        Raises:
            SampleTimeoutError: there is none after ``seconds``.
            WorkerExitedError: the worker exited.
            WorkerError: it wrote something else.
        """
        try:
            score = _decoder.decode(await self._line(seconds))
        except TimeoutError:
            raise SampleTimeoutError("took too long") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise WorkerExitedError("exited") from None
        except (ValueError, RecursionError, asyncio.LimitOverrunError):
            raise WorkerError("wrote something other than a score") from None
        if score.sample != self.chunk[0].sample:
            raise WorkerError("wrote something other than the score of its sample")
        return score

    async def _line(self, seconds: float) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._reader.readuntil()
        async with asyncio.timeout(GRACE_SECONDS):
            return await self._reader.readuntil()

    async def end(self, exited: bool) -> str:
        """End the worker and the processes that it started; return how it ended.

        ``exited``: whether it has ended by itself, so that its parent will end as it did.
        """
        (self._writer or self._socket).close()
        try:
            if not exited:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
            await self._wait()
        finally:
            kill_with_descendants(self.pid)  # if the parent has not done it
            how = self._reap()
        return how

    async def _wait(self) -> None:
        """Wait until the parent has ended, at most EXIT_SECONDS."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        with contextlib.suppress(OSError, TimeoutError):  # ProcessLookupError: as in _reap
            process = os.pidfd_open(self.pid)
            try:
                loop.add_reader(process, ended.set)
                async with asyncio.timeout(EXIT_SECONDS):
                    await ended.wait()
            finally:
                loop.remove_reader(process)
                os.close(process)

    def _reap(self) -> str:
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the reward's own code has changed the handling of SIGCHLD
            return "unknown exit code"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
