"""Asks one reward service for scores.

A sample is sent in the turn of the event loop in which it ended; samples that end while all requests are out wait for
the first to come back and then share one. A service that is away is asked again until it answers: nothing is lost and
one line is logged. A service that answers nonsense fails the samples it was asked about, one by one. So does one that
breaks over a request (it dies, hangs, or answers HTTP 500): its samples are asked about one by one. Requests that were
out together break together, so one over which it breaks again is asked about with nothing else out, and has failed when
it breaks three times so.
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
SPARE_SECONDS = 30.0
BREAKS = 3
NOT_NOW = (408, 425, 429)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ScoreReply)


class BadAnswerError(Exception):
    """The service answered, but not with a score for every sample."""


class BrokenError(Exception):
    """The service took the request and broke over it."""


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
        self._requests = max(2, 2 * reward.processes)  # a pool with one request at work and one waiting is never idle
        self._seconds_per_sample = reward.timeout_seconds / reward.processes
        self._asked = 0  # samples in requests that are out
        self._gate = _ExclusiveGate()
        self._waiting: list[_Waiting] = []
        self._out: set[asyncio.Task[None]] = set()
        self._flushing = False
        self._away = False

    async def score(self, item: ScoreItem) -> Score:
        """Return the score of ``item``; its ``error`` is set if the service could not score it."""
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        return await waiting.answer

    async def wait_until_reachable(self) -> None:
        """Wait until something answers at the service's address; say so when it does not at once."""
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        limit = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        while True:
            try:
                async with self._session.get(f"{self._base}/healthz", timeout=limit) as response:
                    if response.status < 500:  # it need not have this path
                        self._report_back()
                        return
                    self._report_away(f"HTTP {response.status}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._report_away(str(error) or type(error).__name__)
            await backoff.wait()

    async def close(self) -> None:
        """Give up all requests."""
        for request in list(self._out):
            request.cancel()
        await asyncio.gather(*self._out, return_exceptions=True)

    def _flush(self) -> None:
        self._flushing = False
        self._waiting = [waiting for waiting in self._waiting if not waiting.answer.done()]  # less those cancelled
        while self._waiting and len(self._out) < self._requests:
            batch, self._waiting = self._waiting[:ITEMS_PER_REQUEST], self._waiting[ITEMS_PER_REQUEST:]
            request = asyncio.create_task(self._serve(batch))
            self._out.add(request)
            request.add_done_callback(self._done)

    def _done(self, request: asyncio.Task[None]) -> None:
        self._out.discard(request)
        if not request.cancelled():
            self._flush()

    async def _serve(self, batch: list[_Waiting]) -> None:
        try:
            scores = await self._ask_patiently(batch)
        except (BadAnswerError, BrokenError) as error:
            if len(batch) > 1:  # find the one that it is about
                for waiting in batch:
                    await self._serve([waiting])
                return
            scores = [_failed(batch[0].item, str(error))]
        for waiting, score in zip(batch, scores, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(score)

    async def _ask_patiently(self, batch: list[_Waiting]) -> list[Score]:
        """Return the scores of ``batch``, however long the service is away.

        Raises:
            BadAnswerError: the service answered something else.
            BrokenError: it broke over several samples once, or over a single one BREAKS times.
        """
        try:
            body = _encoder.encode(ScoreRequest([waiting.item for waiting in batch]))
        except (TypeError, ValueError, OverflowError) as error:
            raise BadAnswerError(f"the sample cannot be sent to reward {self._name}: {error}") from error
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        breaks, alone = 0, False
        while not all(waiting.answer.done() for waiting in batch):
            try:
                async with self._gate.taken(alone):
                    answer = await self._ask(body, len(batch))
                if answer is not None:
                    return self._read(batch, answer)
            except BrokenError:
                breaks += alone
                alone = True
                if len(batch) > 1 or breaks == BREAKS:
                    raise
            await backoff.wait()
        return [_failed(waiting.item, "cancelled") for waiting in batch]

    async def _ask(self, body: bytes, samples: int) -> bytes | None:
        """Return what the service answers; None while it is away.

        Raises:
            BadAnswerError: it refuses the request.
            BrokenError: it took the request and died, hung, or answered HTTP 500.
        """
        self._asked += samples
        # Longer than the service can take with every sample at its limit: a net under a service that hangs.
        limit = aiohttp.ClientTimeout(
            total=self._asked * self._seconds_per_sample + SPARE_SECONDS, sock_connect=CONNECT_SECONDS
        )
        try:
            async with self._session.post(
                f"{self._base}/v1/score", data=body, headers={"Content-Type": "application/json"}, timeout=limit
            ) as response:
                answer, status = await response.read(), response.status
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._report_away(str(error))
            return None
        except TimeoutError:
            raise BrokenError(self._report_broken(f"did not answer within {limit.total:.0f} s")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenError(self._report_broken(f"broke the connection ({error})")) from None
        finally:
            self._asked -= samples
        if status == 200:
            self._report_back()
            return answer
        said = f"HTTP {status}: {' '.join(answer[:200].decode(errors='replace').split())}"
        if status == 500:
            raise BrokenError(self._report_broken(f"answered {said}"))
        if 400 <= status < 500 and status not in NOT_NOW:
            self._report_back()
            raise BadAnswerError(f"reward {self._name} refused the sample: {said}")
        self._report_away(f"HTTP {status}")
        return None

    def _read(self, batch: list[_Waiting], answer: bytes) -> list[Score]:
        try:
            scores = _decoder.decode(answer).scores
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BadAnswerError(f"reward {self._name} answered something else than scores: {error}") from None
        if [score.sample for score in scores] != [waiting.item.sample for waiting in batch]:
            raise BadAnswerError(f"reward {self._name} answered for other samples than it was asked about")
        return [self._checked(score) for score in scores]

    def _checked(self, score: Score) -> Score:
        if not score.error and not all(map(math.isfinite, (score.reward, *score.metrics.values()))):
            score.error = f"reward {self._name} answered a number that is not finite"
        return score

    def _report_broken(self, what: str) -> str:
        """Log that the service broke over a request; return the reason for the sample that it was about."""
        log.warning("reward %s %s; asking again, one sample at a time", self._name, what)
        return f"reward {self._name} {what}, {BREAKS} times on this sample alone"

    def _report_away(self, why: str) -> None:
        if not self._away:
            log.warning("reward %s does not answer (%s); asking again until it does", self._name, why)
        self._away = True

    def _report_back(self) -> None:
        if self._away:
            log.warning("reward %s answers again", self._name)
        self._away = False


class _ExclusiveGate:
    """Who may ask now: all at once, but nobody beside one that is to be asked about alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._out = 0
        self._alone = 0  # waiting or out

    @asynccontextmanager
    async def taken(self, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn, and have it inside."""
        self._alone += alone
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._out if alone else not self._alone)
                self._out += 1
            try:
                yield
            finally:
                self._out -= 1
        finally:
            self._alone -= alone
            async with self._changed:
                self._changed.notify_all()


def _failed(item: ScoreItem, reason: str) -> Score:
    return Score(item.sample, 0.0, {}, reason)
