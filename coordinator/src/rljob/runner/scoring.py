"""Requests scores from one reward service.

A sample is sent in the iteration of the event loop in which it ended. Samples that end while all requests are in flight
wait for the first request to return and then share the next one. If the service is unavailable, the request is repeated
until the service answers: no sample is lost, and one line is logged. If the service refuses a request, answers
something other than its scores, or fails on it (it dies, hangs, answers HTTP 500), each sample of the request is sent
by itself. A sample that is refused is marked failed, and so is one that gets another answer than a score three times.
Concurrent requests can fail together, so a single sample on which the service fails is retried with no other request in
flight at its replica; it is marked failed after three isolated failures.

Choice of the replica, circuit breakers and Retry-After: :mod:`rljob.runner.service_replicas`. The slowest requests are
sent again to another replica: :mod:`rljob.runner.hedging`. Requests and replies have the bounds of
:mod:`rljob.protocol.score_messages`. A reply is read no further than its bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from rljob.api.roles import Reward
from rljob.protocol.backoff import Backoff
from rljob.protocol.score_messages import (
    MAX_ERROR,
    MAX_ITEMS,
    MAX_MAGNITUDE,
    MAX_REQUEST_BYTES,
    SAMPLE_TRIES,
    Score,
    ScoreItem,
    ScoreReply,
    ScoreRequest,
    usable,
)
from rljob.runner.hedging import HedgeDelay, hedged
from rljob.runner.reward_http import RefusedSampleError, RewardHttp, RewardUnavailableError, ServiceFailedError
from rljob.runner.score_cache import ScoreCache
from rljob.runner.service_replicas import Replica, ReplicaSet

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
EXTRA_SECONDS = 30.0
LATER_SECONDS = 1.0
"""Until a sample is asked again that a reward cannot score now."""
ISOLATED_FAILURES = 3
MALFORMED_REPLIES = 3
NOT_SCORED = "not_scored"
"""Metric of a sample whose reward is the manifest's notScoredReward: 1."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ScoreReply)


class MalformedReplyError(Exception):
    """The service answered something other than its scores."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    item: ScoreItem
    answer: asyncio.Future[Score]


class RewardClient:
    """The requests to one reward service.

    Args:
        reward: the manifest's entry.
        url: address of the service. Pods of the job are found by the addresses of its name.
        session: see :func:`rljob.runner.service_http.service_session`.
        token: sent with every request; empty: none.
    """

    def __init__(self, reward: Reward, url: str, session: aiohttp.ClientSession, token: str = "") -> None:
        self._name = reward.name
        self._http = RewardHttp(reward.name, url, session, token)
        pods = reward.url is None and self._http.has_name
        limit = max(2, 2 * reward.processes)  # one in work and one waiting per process keep the pool busy
        self._replicas = ReplicaSet(self._http.addresses if pods else None, limit)
        self._seconds_per_sample = SAMPLE_TRIES * reward.timeout_seconds / reward.processes
        self._not_scored_reward = reward.not_scored_reward
        self._not_scored = 0
        self.token_ids = reward.token_ids
        """Whether requests have the token ids of answers."""
        self._delay = HedgeDelay()
        self._cache = ScoreCache()
        self._waiting: list[_Waiting] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._later: dict[_Waiting, asyncio.TimerHandle] = {}
        self._flushing = False

    async def score(self, item: ScoreItem) -> Score:
        """Return the score of ``item``; its ``error`` is set if the service could not score it."""
        if item.response_token_ids is not None and not self.token_ids:  # another reward of the sample needs them
            item = msgspec.structs.replace(item, response_token_ids=None)
        if (known := self._cache.get(item)) is not None:
            return known
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        score = await waiting.answer
        if score.error and self._not_scored_reward is not None:
            return self._counted(score, self._not_scored_reward)
        return score

    async def wait_until_reachable(self) -> None:
        """Wait until a server answers at the service's address; log a warning if the first attempt fails."""
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        while not await self._http.is_reachable():
            await backoff.wait()

    async def close(self) -> None:
        """Cancel all requests."""
        for timer in self._later.values():
            timer.cancel()
        for request in list(self._in_flight):
            request.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        await self._replicas.close()

    def _flush(self) -> None:
        self._flushing = False
        self._waiting = [waiting for waiting in self._waiting if not waiting.answer.done()]  # drops cancelled samples
        while self._waiting and len(self._in_flight) < self._replicas.limit:
            batch, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
            request = asyncio.create_task(self._score_batch(batch, set()))
            self._in_flight.add(request)
            request.add_done_callback(self._done)

    def _done(self, request: asyncio.Task[None]) -> None:
        self._in_flight.discard(request)
        if not request.cancelled():
            self._flush()

    async def _score_batch(self, batch: list[_Waiting], failed: set[str]) -> None:
        """Answer the samples of ``batch``. ``failed``: addresses of replicas that failed on them."""
        try:
            scores = await self._request_scores(batch, failed)
        except (RefusedSampleError, MalformedReplyError, ServiceFailedError) as error:
            if len(batch) > 1:  # find the sample that causes the failure
                for waiting in batch:
                    await self._score_batch([waiting], set(failed))
                return
            scores = [_failed(batch[0].item, str(error))]
        except Exception as error:  # a defect of this module: without an answer the samples would wait forever
            log.exception("reward %s: a request for %d samples failed", self._name, len(batch))
            reason = f"reward {self._name} could not be asked ({type(error).__name__}: {error})"
            scores = [_failed(waiting.item, reason) for waiting in batch]
        for waiting, score in zip(batch, scores, strict=True):
            if waiting.answer.done():
                continue
            if score.later:
                self._ask_later(waiting, score.error)
            else:
                waiting.answer.set_result(score)

    def _ask_later(self, waiting: _Waiting, reason: str) -> None:
        """Ask for a sample again that the reward cannot score now. The others do not wait for it."""
        if not self._later:
            log.warning("%s; asking again", reason)
        self._later[waiting] = asyncio.get_running_loop().call_later(LATER_SECONDS, self._ask_again, waiting)

    def _ask_again(self, waiting: _Waiting) -> None:
        del self._later[waiting]
        self._waiting.append(waiting)
        self._flush()

    async def _request_scores(self, batch: list[_Waiting], failed: set[str]) -> list[Score]:
        """Return the scores of ``batch``; repeat the request while the service is unavailable.

        Raises:
            RefusedSampleError: the service refuses the request, or it cannot be sent.
            MalformedReplyError: the replies to several samples, or MALFORMED_REPLIES to one, are not scores.
            ServiceFailedError: the service failed once on several samples, or ISOLATED_FAILURES times on a single
                sample with no other request in flight.
        """
        body = self._encoded(batch)
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        failures, malformed, isolated = 0, 0, False
        while not all(waiting.answer.done() for waiting in batch):
            try:
                return await self._answer(batch, body, isolated, failed)
            except RewardUnavailableError:
                pass
            except MalformedReplyError:
                malformed += 1
                if len(batch) > 1 or malformed == MALFORMED_REPLIES:
                    raise
                continue
            except ServiceFailedError as error:
                failures += isolated
                isolated = True
                if len(batch) > 1:
                    raise
                if failures == ISOLATED_FAILURES:
                    reason = f"reward {self._name} {error}, {ISOLATED_FAILURES} times on this sample alone"
                    raise ServiceFailedError(reason) from None
            await backoff.wait()
        return [_failed(waiting.item, "cancelled") for waiting in batch]

    def _encoded(self, batch: list[_Waiting]) -> bytes:
        """Return a request for the samples of ``batch``.

        Raises:
            RefusedSampleError: they cannot be sent.
        """
        try:
            body = _encoder.encode(ScoreRequest([waiting.item for waiting in batch]))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RefusedSampleError(f"the sample cannot be sent to reward {self._name}: {error}") from error
        if len(body) > MAX_REQUEST_BYTES:
            raise RefusedSampleError(
                f"the sample cannot be sent to reward {self._name}: it has {len(body):,} bytes, and a request has at "
                f"most {MAX_REQUEST_BYTES:,}; shorten its row or its answer"
            )
        return body

    async def _answer(self, batch: list[_Waiting], body: bytes, isolated: bool, failed: set[str]) -> list[Score]:
        """Return the scores that a replica answers. ``failed``: as for :meth:`_score_batch`.

        Raises:
            RewardUnavailableError, RefusedSampleError, ServiceFailedError: see :meth:`RewardHttp.post`.
            MalformedReplyError: it answers something else.
        """
        clock = asyncio.get_running_loop().time
        async with self._replicas.enter(isolated, failed) as replica:
            failed.add(replica.address)  # until it answers
            began = clock()
            delay = None if isolated else self._delay.seconds
            request = self._post(replica, batch, body)
            if delay is None:
                scores = await request
            else:
                scores = await hedged(request, lambda: self._repetition(replica, batch, body), delay)
            self._delay.observe(clock() - began)
            failed.discard(replica.address)
            return scores

    def _repetition(
        self, first: Replica, batch: list[_Waiting], body: bytes
    ) -> Coroutine[Any, Any, list[Score]] | None:
        """Return the request to another replica; None: there is none, or enough requests were sent twice."""
        spare = self._replicas.spare(first)
        if spare is None or not self._delay.take():
            return None

        async def post() -> list[Score]:
            with spare.sending():
                scores = await self._post(spare, batch, body)
            first.failed()  # it is slower than the other one and than nearly all requests before
            return scores

        return post()

    async def _post(self, replica: Replica, batch: list[_Waiting], body: bytes) -> list[Score]:
        replica.samples += len(batch)
        try:
            # Longer than the service needs if every try of every sample takes its time: only a hung service exceeds it.
            limit = replica.samples * self._seconds_per_sample + EXTRA_SECONDS
            answer = await self._http.post(replica, body, len(batch), limit)
        finally:
            replica.samples -= len(batch)
        try:
            return self._read(batch, answer)
        except ValueError as error:
            raise MalformedReplyError(f"reward {self._name} {error}") from None
        finally:
            replica.succeeded()

    def _read(self, batch: list[_Waiting], answer: bytes) -> list[Score]:
        """Return the scores of a reply.

        Raises:
            ValueError: it has others, or none. The message continues "reward NAME".
        """
        try:
            reply = _decoder.decode(answer)
        except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
            raise ValueError(f"answered something else than scores: {error}") from None
        if [score.sample for score in reply.scores] != [waiting.item.sample for waiting in batch]:
            raise ValueError("answered for other samples than those requested")
        scores = [self._checked(score) for score in reply.scores]
        if reply.deterministic:
            for waiting, score in zip(batch, scores, strict=True):
                if not score.later:
                    self._cache.put(waiting.item, score)
        return scores

    def _checked(self, score: Score) -> Score:
        if not score.error and not all(map(usable, (score.reward, *score.metrics.values()))):
            score.error = f"reward {self._name} answered a number that is not finite or beyond {MAX_MAGNITUDE:g}"
        score.error = score.error[:MAX_ERROR]
        return score

    def _counted(self, score: Score, reward: float) -> Score:
        """Return the score of a sample that could not be scored, as the manifest wants it."""
        self._not_scored += 1
        if self._not_scored == 1:
            log.warning(
                "reward %s: a sample that is not scored counts as %g, as notScoredReward says; the first one: %s",
                self._name,
                reward,
                score.error,
            )
        return Score(score.sample, reward, {NOT_SCORED: 1.0})


def _failed(item: ScoreItem, reason: str) -> Score:
    return Score(item.sample, 0.0, {}, reason[:MAX_ERROR])
