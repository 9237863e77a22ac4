"""Requests scores from one reward service.

A sample is sent in the iteration of the event loop in which it ended. Samples that end while all requests are in flight
wait for the first request to return and then share the next one. If the service is unavailable, the request is repeated
until the service answers: no sample is lost, and one line is logged. If the service answers a request with something
other than its scores, or fails on it (it dies, hangs, or answers HTTP 500), each sample of the request is sent by
itself. An invalid reply then fails its sample. Concurrent requests can fail together, so a single sample on which the
service fails is retried with no other request in flight; it is marked failed after three isolated failures.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from rljob.api.roles import Reward
from rljob.protocol.backoff import Backoff
from rljob.protocol.score_messages import Score, ScoreItem, ScoreReply, ScoreRequest

log = logging.getLogger(__name__)

ITEMS_PER_REQUEST = 64
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
CONNECT_SECONDS = 5.0
EXTRA_SECONDS = 30.0
ISOLATED_FAILURES = 3
RETRY_STATUSES = (408, 425, 429)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ScoreReply)


class InvalidReplyError(Exception):
    """The service replied, but not with a score for every sample."""


class ServiceFailedError(Exception):
    """The service accepted the request and failed on it: it died, hung, or answered HTTP 500."""


@dataclass(frozen=True)
class _Waiting:
    item: ScoreItem
    answer: asyncio.Future[Score]


class RewardClient:
    """The requests to one reward service.

    Args:
        reward: the manifest's entry.
        url: address of the service.
        session: shared by all clients of the process.
    """

    def __init__(self, reward: Reward, url: str, session: aiohttp.ClientSession) -> None:
        self._name = reward.name
        self._base = url.rstrip("/")
        self._session = session
        self._requests = max(2, 2 * reward.processes)  # one in work and one waiting per process keep the pool busy
        self._seconds_per_sample = reward.timeout_seconds / reward.processes
        self._samples_in_flight = 0
        self._gate = _ExclusiveGate()
        self._waiting: list[_Waiting] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._flushing = False
        self._unavailable = False

    async def score(self, item: ScoreItem) -> Score:
        """Return the score of ``item``; its ``error`` is set if the service could not score it."""
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        return await waiting.answer

    async def wait_until_reachable(self) -> None:
        """Wait until a server answers at the service's address; log a warning if the first attempt fails."""
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        limit = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        while True:
            try:
                async with self._session.get(f"{self._base}/healthz", timeout=limit) as response:
                    if response.status < 500:  # a user's service may not have this path
                        self._report_available()
                        return
                    self._report_unavailable(f"HTTP {response.status}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._report_unavailable(str(error) or type(error).__name__)
            await backoff.wait()

    async def close(self) -> None:
        """Cancel all requests."""
        for request in list(self._in_flight):
            request.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _flush(self) -> None:
        self._flushing = False
        self._waiting = [waiting for waiting in self._waiting if not waiting.answer.done()]  # drops cancelled samples
        while self._waiting and len(self._in_flight) < self._requests:
            batch, self._waiting = self._waiting[:ITEMS_PER_REQUEST], self._waiting[ITEMS_PER_REQUEST:]
            request = asyncio.create_task(self._score_batch(batch))
            self._in_flight.add(request)
            request.add_done_callback(self._done)

    def _done(self, request: asyncio.Task[None]) -> None:
        self._in_flight.discard(request)
        if not request.cancelled():
            self._flush()

    async def _score_batch(self, batch: list[_Waiting]) -> None:
        try:
            scores = await self._request_scores(batch)
        except (InvalidReplyError, ServiceFailedError) as error:
            if len(batch) > 1:  # find the sample that causes the failure
                for waiting in batch:
                    await self._score_batch([waiting])
                return
            scores = [_failed(batch[0].item, str(error))]
        for waiting, score in zip(batch, scores, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(score)

    async def _request_scores(self, batch: list[_Waiting]) -> list[Score]:
        """Return the scores of ``batch``; repeat the request while the service is unavailable.

        Raises:
            InvalidReplyError: the service replied with something else.
            ServiceFailedError: the service failed once on several samples, or ISOLATED_FAILURES times on a single
                sample with no other request in flight.
        """
        try:
            body = _encoder.encode(ScoreRequest([waiting.item for waiting in batch]))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidReplyError(f"the sample cannot be sent to reward {self._name}: {error}") from error
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        failures, isolated = 0, False
        while not all(waiting.answer.done() for waiting in batch):
            try:
                async with self._gate.enter(isolated):
                    answer = await self._post(body, len(batch))
                if answer is not None:
                    return self._read(batch, answer)
            except ServiceFailedError:
                failures += isolated
                isolated = True
                if len(batch) > 1 or failures == ISOLATED_FAILURES:
                    raise
            await backoff.wait()
        return [_failed(waiting.item, "cancelled") for waiting in batch]

    async def _post(self, body: bytes, samples: int) -> bytes | None:
        """Return the reply of the service; None if it is unavailable.

        Raises:
            InvalidReplyError: the service rejects the request.
            ServiceFailedError: the service accepted the request and died, hung, or answered HTTP 500.
        """
        self._samples_in_flight += samples
        # Longer than the service needs if every sample takes its time limit, so only a service that hangs exceeds it.
        limit = aiohttp.ClientTimeout(
            total=self._samples_in_flight * self._seconds_per_sample + EXTRA_SECONDS, sock_connect=CONNECT_SECONDS
        )
        try:
            async with self._session.post(
                f"{self._base}/v1/score", data=body, headers={"Content-Type": "application/json"}, timeout=limit
            ) as response:
                answer, status = await response.read(), response.status
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._report_unavailable(str(error))
            return None
        except TimeoutError:
            raise ServiceFailedError(self._report_failure(f"did not answer within {limit.total:.0f} s")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceFailedError(self._report_failure(f"broke the connection ({error})")) from None
        finally:
            self._samples_in_flight -= samples
        if status == 200:
            self._report_available()
            return answer
        summary = f"HTTP {status}: {' '.join(answer[:200].decode(errors='replace').split())}"
        if status == 500:
            raise ServiceFailedError(self._report_failure(f"answered {summary}"))
        if 400 <= status < 500 and status not in RETRY_STATUSES:
            self._report_available()
            raise InvalidReplyError(f"reward {self._name} refused the sample: {summary}")
        self._report_unavailable(f"HTTP {status}")
        return None

    def _read(self, batch: list[_Waiting], answer: bytes) -> list[Score]:
        try:
            scores = _decoder.decode(answer).scores
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidReplyError(f"reward {self._name} answered something else than scores: {error}") from None
        if [score.sample for score in scores] != [waiting.item.sample for waiting in batch]:
            raise InvalidReplyError(f"reward {self._name} answered for other samples than those requested")
        return [self._checked(score) for score in scores]

    def _checked(self, score: Score) -> Score:
        if not score.error and not all(map(math.isfinite, (score.reward, *score.metrics.values()))):
            score.error = f"reward {self._name} answered a number that is not finite"
        return score

    def _report_failure(self, what: str) -> str:
        """Log that the service failed on a request; return the reason that its sample is failed with."""
        log.warning("reward %s %s; asking again, one sample at a time", self._name, what)
        return f"reward {self._name} {what}, {ISOLATED_FAILURES} times on this sample alone"

    def _report_unavailable(self, why: str) -> None:
        if not self._unavailable:
            log.warning("reward %s does not answer (%s); asking again until it does", self._name, why)
        self._unavailable = True

    def _report_available(self) -> None:
        if self._unavailable:
            log.warning("reward %s answers again", self._name)
        self._unavailable = False


class _ExclusiveGate:
    """Admits requests: shared requests concurrently, an isolated request only while no other request is in flight."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._in_flight = 0
        self._isolated = 0  # waiting or in flight

    @asynccontextmanager
    async def enter(self, isolated: bool) -> AsyncIterator[None]:
        """Wait until the request may be sent; it is in flight inside the context."""
        self._isolated += isolated
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._in_flight if isolated else not self._isolated)
                self._in_flight += 1
            try:
                yield
            finally:
                self._in_flight -= 1
        finally:
            self._isolated -= isolated
            async with self._changed:
                self._changed.notify_all()


def _failed(item: ScoreItem, reason: str) -> Score:
    return Score(item.sample, 0.0, {}, reason)
