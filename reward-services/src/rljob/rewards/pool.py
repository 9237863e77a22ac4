"""The pool of worker processes: many samples per message, one time limit per sample.

A sample that exceeds the limit gets an error, its worker is replaced, and the samples behind it are scored by the new
worker. A sample whose worker exits is tried once more, because another sample may be the cause; then it gets an error
too. Therefore no reward can stop the service or affect another sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards import metrics
from rljob.rewards.evaluate import error_score
from rljob.rewards.worker import fork_worker

log = logging.getLogger(__name__)

CHUNK = 32  # maximum number of samples that a worker receives at a time
GRACE_SECONDS = 0.05  # to read a score that arrived in time although the service was not scheduled
MAX_LINE_BYTES = 16 << 20
TRIES = 2

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Score)


@dataclass(eq=False)
class _Job:
    item: ScoreItem
    result: asyncio.Future[Score]
    tries: int = 0


class _Worker:
    """The service's side of a worker process, and the samples it has not answered yet."""

    def __init__(self, score: Callable[[ScoreItem], Score]) -> None:
        self._pid, self._socket = fork_worker(score)
        self._writer: asyncio.StreamWriter | None = None
        self.chunk: deque[_Job] = deque()

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_LINE_BYTES)

    def give(self, chunk: deque[_Job]) -> None:
        assert self._writer is not None
        self.chunk = chunk
        self._writer.write(_encoder.encode([job.item for job in chunk]) + b"\n")

    async def answer(self, seconds: float) -> bytes:
        """Return the next line, incomplete if the worker exited; TimeoutError after ``seconds``."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await self._reader.readline()
            async with asyncio.timeout(GRACE_SECONDS):
                return await self._reader.readline()
        except ConnectionError:  # it exited before it read the chunk
            return b""

    def end(self) -> str:
        """Kill the process if it has not exited; return how it ended. The status of a process that is already exiting
        does not change."""
        (self._writer or self._socket).close()
        os.kill(self._pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Pool:
    """Scores samples in ``processes`` workers; an async context manager, entered on the main thread.

    Args:
        score: scores one sample in a worker. Everything it needs is loaded before the workers are forked.
        name: the reward's name, for errors.
        processes: workers.
        timeout_seconds: limit for one sample.
    """

    def __init__(self, score: Callable[[ScoreItem], Score], name: str, processes: int, timeout_seconds: float) -> None:
        self._score = score
        self._name = name
        self._processes = processes
        self._timeout = timeout_seconds
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pool:
        self._tasks = [asyncio.create_task(self._keep_worker()) for _ in range(self._processes)]
        for task in self._tasks:
            task.add_done_callback(_end_process)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def score(self, items: list[ScoreItem]) -> list[Score]:
        """Return the scores of ``items``, in order."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(item, loop.create_future()) for item in items]
        for job in jobs:
            self._queue.put_nowait(job)
        try:
            return [await job.result for job in jobs]
        finally:  # if the client is gone, samples that have not started are dropped
            for job in jobs:
                job.result.cancel()

    async def _keep_worker(self) -> None:
        """Keep one worker alive and busy until the task is cancelled."""
        while True:
            worker = _Worker(self._score)
            try:
                await worker.connect()
                timed_out = await self._work(worker)
            finally:
                how = worker.end()
            if worker.chunk:
                self._handle_worker_exit(worker.chunk.popleft(), timed_out, how)
                for job in worker.chunk:
                    self._queue.put_nowait(job)

    async def _work(self, worker: _Worker) -> bool:
        """Score chunks until a sample exceeds the limit (return True) or the worker exits (return False)."""
        while True:
            worker.give(await self._take_chunk())
            while worker.chunk:
                started = time.perf_counter()
                try:
                    line = await worker.answer(self._timeout)
                except TimeoutError:
                    return True
                if not line.endswith(b"\n"):
                    return False
                metrics.SECONDS.observe(time.perf_counter() - started)
                _answer(worker.chunk.popleft(), _decoder.decode(line))

    async def _take_chunk(self) -> deque[_Job]:
        """Return waiting samples, at most this worker's share."""
        chunk = deque[_Job]()
        while not chunk:
            waiting = [await self._queue.get()]
            for _ in range(min(CHUNK, math.ceil(self._queue.qsize() / self._processes)) - 1):
                waiting.append(self._queue.get_nowait())
            chunk.extend(job for job in waiting if not job.result.done())
        return chunk

    def _handle_worker_exit(self, job: _Job, timed_out: bool, how: str) -> None:
        """Retry or fail the sample that a worker was scoring when it ended."""
        job.tries += 1
        if timed_out:
            metrics.TIMEOUTS.inc()
            log.warning("reward %s: sample %s timed out, its worker is replaced", self._name, job.item.sample)
            reason = f"reward {self._name} took longer than {self._timeout:g} s"
        else:
            metrics.CRASHES.inc()
            log.warning("reward %s: a worker exited (%s) on sample %s", self._name, how, job.item.sample)
            reason = f"reward {self._name}: the worker exited ({how}) twice on this sample"
        if timed_out or job.tries >= TRIES:
            _answer(job, error_score(job.item, reason))
        else:
            self._queue.put_nowait(job)


def _answer(job: _Job, score: Score) -> None:
    metrics.SAMPLES.inc()
    if score.error:
        metrics.FAILURES.inc()
        log.debug("sample %s: %s", score.sample, score.error)  # the score carries it to the runner
    if not job.result.done():
        job.result.set_result(score)


def _end_process(task: asyncio.Task[None]) -> None:
    """End the service if a task of the pool failed: requests would hang without it. The service is restarted."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("a task of the reward's pool failed", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
