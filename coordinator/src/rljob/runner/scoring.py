"""Requests scores from one reward service.

A sample is sent in the iteration of the event loop in which it ended. Samples that end while all requests are in flight
wait for the first request to return and then share the next one. If the service is unavailable, the request is repeated
until the service answers: no sample is lost, and one line is logged. If the service answers a request with something
other than its scores, or fails on it (it dies, hangs, or answers HTTP 500), each sample of the request is sent by
itself. An invalid reply then fails its sample. Concurrent requests can fail together, so a single sample on which the
service fails is retried with no other request in flight; it is marked failed after three isolated failures.

Requests and replies have the bounds of :mod:`rljob.protocol.score_messages`. A reply is read no further than its bound.
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
from rljob.protocol.score_messages import (
    MAX_ERROR,
    MAX_ITEMS,
    MAX_REQUEST_BYTES,
    MAX_SCORE_BYTES,
    Score,
    ScoreItem,
    ScoreReply,
    ScoreRequest,
)

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
CONNECT_SECONDS = 5.0
EXTRA_SECONDS = 30.0
ISOLATED_FAILURES = 3
RETRY_STATUSES = (408, 425, 429)
REFUSAL_BYTES = 200  # of the body of a reply with another status than 200

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ScoreReply)


class InvalidReplyError(Exception):
    """The service replied, but not with a score for every sample."""


class ServiceFailedError(Exception):
    """The service accepted the request and failed on it: it died, hung, or answered HTTP 500."""


def reward_session() -> aiohttp.ClientSession:
    """Return a session for all clients of a process, of rewards and environments. It stores no cookies and decompresses
    no replies, because a small compressed reply can be large."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


@dataclass(frozen=True)
class _Waiting:
    item: ScoreItem
    answer: asyncio.Future[Score]


class RewardClient:
    """The requests to one reward service.

    Args:
        reward: the manifest's entry.
        url: address of the service.
        session: see :func:`reward_session`.
        token: sent with every request; empty: none.
    """

    def __init__(self, reward: Reward, url: str, session: aiohttp.ClientSession, token: str = "") -> None:
        self._name = reward.name
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
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
                health = f"{self._base}/healthz"
                async with self._session.get(health, timeout=limit, allow_redirects=False) as response:
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
            batch, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
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
        except Exception as error:  # a defect of this module: without an answer the samples would wait forever
            log.exception("reward %s: a request for %d samples failed", self._name, len(batch))
            reason = f"reward {self._name} could not be asked ({type(error).__name__}: {error})"
            scores = [_failed(waiting.item, reason) for waiting in batch]
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
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidReplyError(f"the sample cannot be sent to reward {self._name}: {error}") from error
        if len(body) > MAX_REQUEST_BYTES:
            raise InvalidReplyError(
                f"the sample cannot be sent to reward {self._name}: it has {len(body):,} bytes, and a request has at "
                f"most {MAX_REQUEST_BYTES:,}; shorten its row or its answer"
            )
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
                f"{self._base}/v1/score", data=body, headers=self._headers, timeout=limit, allow_redirects=False
            ) as response:
                status, location = response.status, response.headers.get("Location", "")
                longest = samples * MAX_SCORE_BYTES if status == 200 else REFUSAL_BYTES
                answer = await read_at_most(response.content, longest + 1)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._report_unavailable(str(error))
            return None
        except TimeoutError:
            raise ServiceFailedError(self._report_failure(f"did not answer within {limit.total:.0f} s")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceFailedError(self._report_failure(f"broke the connection ({error})")) from None
        finally:
            self._samples_in_flight -= samples
        if status > 500 or status in RETRY_STATUSES:
            self._report_unavailable(f"HTTP {status}")
            return None
        summary = f"HTTP {status}: {one_line(answer[:REFUSAL_BYTES])}"
        if status == 500:
            raise ServiceFailedError(self._report_failure(f"answered {summary}"))
        self._report_available()
        if status == 200 and len(answer) <= longest:
            return answer
        raise InvalidReplyError(self._refusal(status, summary, longest, location))

    def _refusal(self, status: int, summary: str, longest: int, location: str) -> str:
        """Return why a reply is not an answer to its request, as one sentence."""
        if status == 200:
            return f"reward {self._name} answered more than {longest:,} bytes; shorten its metrics"
        if status in (401, 403):
            if "Authorization" in self._headers:
                return f"reward {self._name} refused the run's token ({summary}); it must accept its RLJOB_TOKEN"
            return f"reward {self._name} requires a token ({summary}); rljob sends none to a reward with url"
        if 300 <= status < 400:
            where = one_line(location.encode(errors="replace")[:REFUSAL_BYTES])
            return (
                f"reward {self._name} redirects to {where or 'no address'} (HTTP {status}); redirects are not followed"
            )
        return f"reward {self._name} refused the sample: {summary}"

    def _read(self, batch: list[_Waiting], answer: bytes) -> list[Score]:
        try:
            scores = _decoder.decode(answer).scores
        except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
            raise InvalidReplyError(f"reward {self._name} answered something else than scores: {error}") from None
        if [score.sample for score in scores] != [waiting.item.sample for waiting in batch]:
            raise InvalidReplyError(f"reward {self._name} answered for other samples than those requested")
        return [self._checked(score) for score in scores]

    def _checked(self, score: Score) -> Score:
        if not score.error and not all(map(math.isfinite, (score.reward, *score.metrics.values()))):
            score.error = f"reward {self._name} answered a number that is not finite"
        score.error = score.error[:MAX_ERROR]
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


async def read_at_most(content: aiohttp.StreamReader, most: int) -> bytes:
    """Return the body of a reply, or its first ``most`` bytes."""
    body = bytearray()
    while len(body) < most and (part := await content.read(most - len(body))):
        body += part
    return bytes(body)


def one_line(text: bytes) -> str:
    """Return a part of a reply for a message."""
    return " ".join(text.decode(errors="replace").split())


def _failed(item: ScoreItem, reason: str) -> Score:
    return Score(item.sample, 0.0, {}, reason[:MAX_ERROR])
