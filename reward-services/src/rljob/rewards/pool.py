"""The pool of worker processes: many samples per message, one time limit per sample.

A worker that exits, writes something other than its score, or must be ended because a sample exceeds the limit, is
replaced. The samples behind that one are scored by the new worker. The sample itself is tried once more after them,
because what an earlier sample or the machine did may be the cause; then it gets an error. An error of the service
itself, for example that the system has no process left, replaces the worker too. Therefore no reward can stop the
service or affect another sample.

While no worker is set up, samples are asked for later, since their time limit says nothing about the set-up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque

import msgspec

from rljob.protocol.backoff import Backoff
from rljob.protocol.score_messages import SAMPLE_TRIES, Score, ScoreItem
from rljob.rewards import metrics
from rljob.rewards.evaluate import error_kind, error_score, time_limit_sentence, unavailable_score
from rljob.rewards.pool_worker import (
    PoolWorker,
    SampleTimeoutError,
    ScoreJob,
    SetUpError,
    StartError,
    WorkerError,
    WorkerExitedError,
)
from rljob.rewards.worker import Evaluator

log = logging.getLogger(__name__)

CHUNK = 32  # maximum number of samples that a worker receives at a time
OWN_LIMIT_SECONDS = 1.0  # for a scorer that ends its samples by itself at the limit, before the worker is killed
SET_UP_SECONDS = 5.0  # for a worker; after them, samples do not wait for it
KEPT_TRIES = 4096  # samples whose tries are kept until they are asked for again
BEING_SET_UP = "its worker is being set up"
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.1, 5.0  # after an error of the service

_encoder = msgspec.json.Encoder()


class Pool:
    """Scores samples in ``processes`` workers; an async context manager, entered on the main thread.

    Args:
        evaluator: scores samples in a worker. Everything it needs is loaded before the workers are forked.
        name: the reward's name, for errors; the same as the evaluator's.
        processes: workers.
        timeout_seconds: limit for one sample.
        memory_bytes: limit for what a worker allocates; None: none.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        name: str,
        processes: int,
        timeout_seconds: float,
        memory_bytes: int | None = None,
    ) -> None:
        self._evaluator = evaluator
        self.name = name
        """The reward's name."""
        self._processes = processes
        self._timeout = timeout_seconds
        self._memory = memory_bytes
        self._queue: asyncio.Queue[ScoreJob] = asyncio.Queue()
        self.workers: set[int] = set()
        """Process ids of the parents of the workers, which are children of the service."""
        self._in_use: set[PoolWorker] = set()
        self._set_up = 0  # workers that can receive samples
        self._tried = asyncio.Event()
        self._slow: asyncio.TimerHandle | None = None
        self._slow_logged = False
        self._tries = dict[bytes, int]()  # samples to score alone, asked for later → workers that ended on them
        self.not_ready = BEING_SET_UP
        """Why no sample can be scored now; empty: it can."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pool:
        metrics.QUEUED.set_function(lambda: self.waiting)
        metrics.IN_FLIGHT.set_function(lambda: sum(len(worker.chunk) for worker in self._in_use))
        self._await_worker()
        self._tasks = [asyncio.create_task(self._keep_worker()) for _ in range(self._processes)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._slow is not None:
            self._slow.cancel()

    async def wait_until_ready(self) -> None:
        """Wait until a worker is set up, or the set-up of one has failed; then ``not_ready`` says why."""
        await self._tried.wait()

    def stop_waiting(self) -> None:
        """End :meth:`wait_until_ready`."""
        self._tried.set()

    @property
    def deterministic(self) -> bool:
        """Whether equal samples always have the same score."""
        return self._evaluator.deterministic

    @property
    def waiting(self) -> int:
        """Number of samples that no worker has received."""
        return self._queue.qsize()

    async def score(self, items: list[ScoreItem]) -> list[Score]:
        """Return the scores of ``items``, in order."""
        jobs = [self._enqueue(item) for item in items]
        try:
            return [await job.result for job in jobs]
        finally:  # if the client is gone, samples that have not started are dropped
            for job in jobs:
                job.result.cancel()

    def _enqueue(self, item: ScoreItem) -> ScoreJob:
        job = ScoreJob(item.sample, b"", asyncio.get_running_loop().create_future())
        try:
            job.text = _encoder.encode(item)
            tries = self._tries.pop(job.digest, None) if self._tries else None
            job.tries, job.alone = tries or 0, tries is not None
        except (ValueError, RecursionError) as error:
            self._answer(job, error_score(item.sample, f"the sample cannot be passed to a worker: {error}"))
        else:
            self._queue.put_nowait(job)
        return job

    async def _keep_worker(self) -> None:
        """Keep one worker alive and busy until the task is cancelled. All errors end here."""
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        while True:
            try:
                worker = PoolWorker(self._evaluator, self._timeout, self._memory)
                self.workers.add(worker.pid)
                self._in_use.add(worker)
                await self._use(worker)
            except StartError as error:
                log.error("reward %s: %s; trying again", self.name, error)
                self._refuse(str(error))
                if isinstance(error, SetUpError):
                    self._ask_later()
                await backoff.wait()
            except Exception:  # no process left, or a defect of this module: without workers all samples would wait
                log.exception("reward %s: a worker cannot be used; trying another one", self.name)
                self._refuse("no worker can be used")
                await backoff.wait()
            else:
                backoff.reset()

    async def _use(self, worker: PoolWorker) -> None:
        """Score samples until the worker is of no more use; then end it and pass its samples on.

        Raises:
            StartError: it could not receive any.
        """
        error: WorkerError | None = WorkerError("cannot be used")
        ready = False
        try:
            await self._connect(worker)
            ready = True
            try:
                await self._work(worker)
            finally:
                self._set_up -= 1
                if not self._set_up:
                    self._tried.clear()
                    self._await_worker()
        except WorkerError as raised:
            error = raised
        except asyncio.CancelledError:
            error = None  # the service ends
            raise
        finally:
            how = await worker.end(isinstance(error, WorkerExitedError))
            self.workers.discard(worker.pid)
            self._in_use.discard(worker)
            if worker.chunk and error is not None:
                if self._evaluator.together and len(worker.chunk) > 1:
                    for job in worker.chunk:
                        job.alone = True
                    failed = None
                else:
                    failed = worker.chunk.popleft()
                for job in worker.chunk:
                    self._queue.put_nowait(job)
                if failed is not None:
                    self._handle_worker_end(failed, error, how)
        if not ready:
            raise StartError(f"its worker ended before it was set up ({how})")

    async def _connect(self, worker: PoolWorker) -> None:
        """Wait until a worker can receive samples.

        Raises:
            WorkerExitedError, SetUpError: see :meth:`PoolWorker.connect`.
        """
        await worker.connect()
        if self._slow is not None:
            self._slow.cancel()
        self._set_up += 1
        self._slow_logged = False
        self.not_ready = ""
        self._tried.set()

    def _await_worker(self) -> None:
        """From now on no worker can receive samples: those that wait for long are asked for later."""
        if self._slow is not None:
            self._slow.cancel()
        self._slow = asyncio.get_running_loop().call_later(SET_UP_SECONDS, self._ask_later)

    def _refuse(self, reason: str) -> None:
        """If no worker can receive samples, say why."""
        if not self._set_up:
            self.not_ready = reason
        self._tried.set()

    def _ask_later(self) -> None:
        """Unless a worker can receive samples, answer those that wait that the reward cannot score them now."""
        if self._set_up:
            return
        self.not_ready = self.not_ready or BEING_SET_UP
        if self.not_ready == BEING_SET_UP and not self._slow_logged:
            log.warning(
                "reward %s: no worker has been set up for %g s; samples wait until one is", self.name, SET_UP_SECONDS
            )
            self._slow_logged = True
        while self._queue.qsize():
            job = self._queue.get_nowait()
            if job.alone:
                self._tries[job.digest] = job.tries
                if len(self._tries) > KEPT_TRIES:
                    del self._tries[next(iter(self._tries))]
            self._answer(job, unavailable_score(job.sample, self.name, self.not_ready))
        self._await_worker()

    async def _work(self, worker: PoolWorker) -> None:
        """Score chunks until the worker raises WorkerError."""
        while True:
            worker.give(await self._take_chunk())
            while worker.chunk:
                started = time.perf_counter()
                score = await worker.answer(self._seconds_for(len(worker.chunk)))
                metrics.SECONDS.observe(time.perf_counter() - started)
                if score.error == time_limit_sentence(self.name, self._timeout):  # of an async scorer
                    metrics.TIMEOUTS.inc()
                self._answer(worker.chunk.popleft(), score)

    def _seconds_for(self, samples: int) -> float:
        """Return the limit for the next answer of a worker that scores a chunk with ``samples`` left."""
        if self._evaluator.batched:
            return self._timeout * samples + OWN_LIMIT_SECONDS
        return self._timeout + (OWN_LIMIT_SECONDS if self._evaluator.together else 0.0)

    async def _take_chunk(self) -> deque[ScoreJob]:
        """Return waiting samples, at most this worker's share."""
        chunk = deque[ScoreJob]()
        while not chunk:
            waiting = [await self._queue.get()]
            most = 1 if waiting[0].alone else min(CHUNK, math.ceil((self._queue.qsize() + 1) / self._processes))
            while len(waiting) < most:
                job = self._queue.get_nowait()
                if job.alone:
                    self._queue.put_nowait(job)
                    break
                waiting.append(job)
            chunk.extend(job for job in waiting if not job.result.done())
        return chunk

    def _handle_worker_end(self, job: ScoreJob, error: WorkerError, how: str) -> None:
        """Retry or fail the sample that a worker was scoring when it ended. ``how``: the end of its process."""
        job.tries += 1
        last = job.tries >= SAMPLE_TRIES
        if isinstance(error, SampleTimeoutError):
            metrics.TIMEOUTS.inc()
            what, reason = "timed out", time_limit_sentence(self.name, self._timeout)
        else:
            metrics.CRASHES.inc()
            what = f"{error} ({how})" if isinstance(error, WorkerExitedError) else str(error)
            reason = f"reward {self.name}: the worker {what} twice on this sample"
        log.warning(
            "reward %s: a worker %s on sample %s; %s",
            self.name,
            what,
            job.sample,
            "not scored" if last else "once more",
        )
        if last:
            self._answer(job, error_score(job.sample, reason))
        else:
            job.alone = True
            self._queue.put_nowait(job)

    def _answer(self, job: ScoreJob, score: Score) -> None:
        metrics.SAMPLES.inc()
        if score.error:
            metrics.ERRORS.labels(error_kind(self.name, score.error)).inc()
        if score.error and not score.later:
            metrics.FAILURES.inc()
            log.debug("sample %s: %s", score.sample, score.error)  # the score carries it to the runner
        if not job.result.done():
            job.result.set_result(score)
