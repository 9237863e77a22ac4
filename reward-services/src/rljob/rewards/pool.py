"""The pool of worker processes: many samples a message, a time limit for each single one.

A sample that overruns costs itself and its worker: it gets an error, a new worker is forked, and the samples behind it
go on. A sample whose worker dies is tried once more, as the death need not be its own; then it gets an error too. So
no reward can stop the service or spoil another sample.
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

from rljob.protocol.rewards import Score, ScoreItem
from rljob.rewards import metrics
from rljob.rewards.evaluate import failed
from rljob.rewards.worker import fork_worker

log = logging.getLogger(__name__)

CHUNK = 32  # samples a worker is given at a time, at most
GRACE_SECONDS = 0.05  # to read a verdict that came in time while the service itself stood still
LONGEST_LINE = 16 << 20
TRIES = 2

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Score)


@dataclass(eq=False)
class _Job:
    item: ScoreItem
    verdict: asyncio.Future[Score]
    tries: int = 0


class _Worker:
    """A worker process seen from the service, and the samples it has not answered yet."""

    def __init__(self, score: Callable[[ScoreItem], Score]) -> None:
        self._pid, self._socket = fork_worker(score)
        self._writer: asyncio.StreamWriter | None = None
        self.chunk: deque[_Job] = deque()

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=LONGEST_LINE)

    def give(self, chunk: deque[_Job]) -> None:
        assert self._writer is not None
        self.chunk = chunk
        self._writer.write(_encoder.encode([job.item for job in chunk]) + b"\n")

    async def answer(self, seconds: float) -> bytes:
        """Return its next line, cut short if it died; TimeoutError when that takes longer."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await self._reader.readline()
            async with asyncio.timeout(GRACE_SECONDS):
                return await self._reader.readline()
        except ConnectionError:  # it died before it read the chunk
            return b""

    def end(self) -> str:
        """Kill it, or find it dead; return how it ended. A process that is exiting already keeps its own status."""
        (self._writer or self._socket).close()
        os.kill(self._pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Pool:
    """Scores samples in ``processes`` workers; an async context manager, to be entered on the main thread.

    Args:
        score: what a worker does with one sample. Everything it needs is loaded before the workers are forked.
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
        """Return the verdicts on ``items``, in order."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(item, loop.create_future()) for item in items]
        for job in jobs:
            self._queue.put_nowait(job)
        try:
            return [await job.verdict for job in jobs]
        finally:  # when whoever asked is gone, what is not begun need not be
            for job in jobs:
                job.verdict.cancel()

    async def _keep_worker(self) -> None:
        """Keep one worker alive and busy, for ever."""
        while True:
            worker = _Worker(self._score)
            try:
                await worker.connect()
                overran = await self._work(worker)
            finally:
                how = worker.end()
            if worker.chunk:
                self._handle_worker_exit(worker.chunk.popleft(), overran, how)
                for job in worker.chunk:
                    self._queue.put_nowait(job)

    async def _work(self, worker: _Worker) -> bool:
        """Score chunk after chunk until a sample overruns (True) or the worker dies (False)."""
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
        """Return what is waiting, at most this worker's share of it."""
        chunk = deque[_Job]()
        while not chunk:
            waiting = [await self._queue.get()]
            for _ in range(min(CHUNK, math.ceil(self._queue.qsize() / self._processes)) - 1):
                waiting.append(self._queue.get_nowait())
            chunk.extend(job for job in waiting if not job.verdict.done())
        return chunk

    def _handle_worker_exit(self, job: _Job, overran: bool, how: str) -> None:
        """Decide about the sample that a worker ended on."""
        job.tries += 1
        if overran:
            metrics.TIMEOUTS.inc()
            log.warning("reward %s: sample %s overran, its worker is replaced", self._name, job.item.sample)
            reason = f"reward {self._name} took longer than {self._timeout:g} s"
        else:
            metrics.DEATHS.inc()
            log.warning("reward %s: a worker died (%s) on sample %s", self._name, how, job.item.sample)
            reason = f"reward {self._name}: the worker died ({how}) twice on this sample"
        if overran or job.tries >= TRIES:
            _answer(job, failed(job.item, reason))
        else:
            self._queue.put_nowait(job)


def _answer(job: _Job, score: Score) -> None:
    metrics.SAMPLES.inc()
    if score.error:
        metrics.FAILURES.inc()
        log.debug("sample %s: %s", score.sample, score.error)  # the sample carries it to whoever asked
    if not job.verdict.done():
        job.verdict.set_result(score)


def _end_process(task: asyncio.Task[None]) -> None:
    """A pool that lost a keeper would hang without a word: end the service instead, it is started again."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("the reward's pool cannot go on", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
