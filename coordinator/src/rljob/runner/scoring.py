"""Asks one reward service for scores.

A sample is sent in the turn of the event loop in which it ended; samples that end while all requests are out wait for
the first to come back and then share one. A service that is away is asked again until it answers: nothing is lost and
one line is logged. A service that answers nonsense fails the samples it was asked about, one by one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass

import aiohttp
import msgspec

from rljob.api.models import Reward
from rljob.protocol.rewards import Score, ScoreItem, ScoreReply, ScoreRequest

log = logging.getLogger(__name__)

ITEMS_PER_REQUEST = 64
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
CONNECT_SECONDS = 5.0
SPARE_SECONDS = 30.0
BAD_REQUEST = (400, 413, 422)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ScoreReply)


class BadAnswerError(Exception):
    """The service answered, but not with a score for every sample."""


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
        self._url = f"{url.rstrip('/')}/v1/score"
        self._session = session
        self._requests = max(2, 2 * reward.processes)  # a pool with one request at work and one waiting is never idle
        # Longer than the service can take with every sample at its limit: a net under a service that hangs.
        worst = reward.timeout_seconds * ITEMS_PER_REQUEST * self._requests / reward.processes + SPARE_SECONDS
        self._timeout = aiohttp.ClientTimeout(total=worst, sock_connect=CONNECT_SECONDS)
        self._waiting: list[_Waiting] = []
        self._out: set[asyncio.Task[None]] = set()
        self._flushing = False
        self._away = False

    async def score(self, item: ScoreItem) -> Score:
        """Return the verdict on ``item``; its ``error`` is set when there is none."""
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        return await waiting.answer

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
            scores = await self._ask(batch)
        except BadAnswerError as error:
            if len(batch) > 1:  # find the one that it is about
                for waiting in batch:
                    await self._serve([waiting])
                return
            scores = [_failed(batch[0].item, str(error))]
        for waiting, score in zip(batch, scores, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(score)

    async def _ask(self, batch: list[_Waiting]) -> list[Score]:
        body = _encoder.encode(ScoreRequest([waiting.item for waiting in batch]))
        headers = {"Content-Type": "application/json"}
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                async with self._session.post(self._url, data=body, headers=headers, timeout=self._timeout) as response:
                    answer, status = await response.read(), response.status
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._report_away(str(error) or type(error).__name__)
            else:
                if status == 200 or status in BAD_REQUEST:
                    self._report_back()
                    return self._read(batch, answer, status)
                self._report_away(f"HTTP {status}")
            if all(waiting.answer.done() for waiting in batch):  # cancelled meanwhile
                return [_failed(waiting.item, "cancelled") for waiting in batch]
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    def _read(self, batch: list[_Waiting], answer: bytes, status: int) -> list[Score]:
        if status != 200:
            text = answer[:200].decode(errors="replace")
            raise BadAnswerError(f"reward {self._name} refused the sample: HTTP {status}: {text}")
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

    def _report_away(self, why: str) -> None:
        if not self._away:
            log.warning("reward %s does not answer (%s); asking again until it does", self._name, why)
        self._away = True

    def _report_back(self) -> None:
        if self._away:
            log.warning("reward %s answers again", self._name)
        self._away = False


def _failed(item: ScoreItem, reason: str) -> Score:
    return Score(item.sample, 0.0, {}, reason)
