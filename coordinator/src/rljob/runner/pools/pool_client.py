"""Requests to the engines of one frozen pool.

A question goes to the engine with the fewest requests of this runner (:mod:`rljob.runner.service_replicas`). While no
engine can take it, it waits, and other questions with it; samples that ask nothing do not. A question fails its sample
if an engine refuses it, if engines fail on it several times, or if no engine of the pool answers for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import aiohttp
from yarl import URL

from rljob.api.roles import Rollout
from rljob.protocol.backoff import Backoff
from rljob.protocol.retry_after import retry_after_seconds
from rljob.runner.context import TrajectoryError
from rljob.runner.pools.question import Question, logprobs_body, read_logprobs, read_reply
from rljob.runner.service_http import (
    CONNECT_SECONDS,
    AvailabilityLog,
    addresses_of,
    has_name,
    one_line,
    read_at_most,
)
from rljob.runner.service_replicas import Replica, ReplicaSet

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.1, 5.0
CHECK_SECONDS = 5.0
STARTING_SECONDS = 3600.0
"""Until the first answer of an engine: large models load slowly."""
EXTRA_SECONDS = 30.0
"""Of a request beyond failurePolicy.stallSeconds, after which the pool itself replaces an engine that hangs."""
MOST_FAILURES = 3
"""Engines that may end, hang or fail while they work on a question."""
RETRY_STATUSES = (408, 425, 429)
MAX_REPLY_BYTES = 4 << 20
LOGPROB_BYTES = 256
"""Of a token in a reply: its id, log-probability, rank and text."""
REFUSAL_BYTES = 400


Reply = TypeVar("Reply")


class EngineAwayError(Exception):
    """The engine did not accept the request."""


class EngineFailedError(Exception):
    """The engine accepted the request, and ended, hung or failed."""


class PoolClient:
    """The questions of a runner to one frozen pool.

    Args:
        pool: the manifest's entry.
        urls: addresses of its engines, or one whose name stands for all of them.
        session: see :func:`rljob.runner.service_http.service_session`.
        token: of the pools.
        stall_seconds: failurePolicy.stallSeconds.
    """

    def __init__(
        self, pool: Rollout, urls: Sequence[str], session: aiohttp.ClientSession, token: str, stall_seconds: float
    ) -> None:
        self._name = pool.name
        self._urls = [URL(url) for url in urls]
        self._session = session
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._stall_seconds = stall_seconds
        self._replicas = ReplicaSet(functools.partial(_engines_at, self._urls), pool.max_concurrency)
        self._availability = AvailabilityLog(f"pool {pool.name}")
        self._clock = asyncio.get_running_loop().time
        self._answered = -math.inf  # time of the last answer of an engine
        self._posted: dict[object, float] = {}  # request in flight → time at which it was sent

    async def answer(self, question: Question, seed: int, seconds: float | None) -> tuple[str, str]:
        """Return the text of an answer and its finish: stop | length.

        Args:
            question: of a loop.
            seed: for the engine, below 2**52.
            seconds: limit of an engine's work on it; None: a little more than failurePolicy.stallSeconds.

        Raises:
            TrajectoryError: it has none; see the module.
        """
        limit = self._stall_seconds + EXTRA_SECONDS if seconds is None else seconds
        return await self._ask(question.path, question.body(seed), limit, read_reply, MAX_REPLY_BYTES)

    async def logprobs(self, token_ids: bytes) -> list[float]:
        """Return the log-probability of each of some tokens (int32), given those before it, at temperature 1; of the
        first one 0.

        Raises:
            TrajectoryError: there are none; see the module.
        """
        body, limit = logprobs_body(self._name, token_ids), self._stall_seconds + EXTRA_SECONDS
        longest = MAX_REPLY_BYTES + LOGPROB_BYTES * (len(token_ids) // 4)
        return await self._ask("v1/completions", body, limit, lambda reply: read_logprobs(reply, token_ids), longest)

    async def _ask(self, path: str, body: bytes, limit: float, read: Callable[[bytes], Reply], most: int) -> Reply:
        """Return what ``read`` makes of the reply of an engine. ``limit``: seconds of its work; ``most``: bytes.

        Raises:
            TrajectoryError: there is none; see the module.
        """
        backoff, failed, failures = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS), set[str](), 0
        asked, problem = self._clock(), "none is ready"
        while True:
            try:
                async with self._engine(asked, failed) as engine:
                    failed.add(engine.address)  # until it answers
                    reply = await self._post(engine, path, body, limit, most)
                    self._replicas.notify()  # it may have been the trial of a circuit breaker
                return read(reply)
            except EngineAwayError as error:
                problem = str(error)
            except EngineFailedError as error:
                problem, failures = str(error), failures + 1
                if failures == MOST_FAILURES:
                    raise TrajectoryError(
                        f"pool {self._name} failed {failures} times on one question: an engine {problem}"
                    ) from None
            except ValueError as error:
                raise TrajectoryError(f"pool {self._name} {error}") from None
            except TimeoutError:
                pass
            if self._patience(asked) <= 0:
                raise TrajectoryError(
                    f"no engine of pool {self._name} has answered for {self._unreachable_seconds:g} s ({problem}); see "
                    "the logs of its engines, or raise failurePolicy.stallSeconds"
                )
            await backoff.wait()

    async def close(self) -> None:
        """End the resolution of the pool's name."""
        await self._replicas.close()

    @asynccontextmanager
    async def _engine(self, asked: float, failed: Collection[str]) -> AsyncIterator[Replica]:
        """Wait for an engine that may get a question.

        Raises:
            TimeoutError: the question was ``asked`` too long ago.
        """
        async with AsyncExitStack() as held:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(self._patience(asked), 0.0), CHECK_SECONDS)):
                        engine = await held.enter_async_context(self._replicas.enter(avoid=failed))
                        break
                if self._patience(asked) <= 0:
                    raise TimeoutError
            yield engine

    @property
    def _unreachable_seconds(self) -> float:
        starting = self._answered == -math.inf
        return max(self._stall_seconds, STARTING_SECONDS) if starting else self._stall_seconds

    def _patience(self, asked: float) -> float:
        """Return the seconds until a question is given up, if no engine answers until then. A request that an engine
        works on has a limit of its own: questions that wait for it are not given up."""
        now = self._clock()
        if any(now - posted > CONNECT_SECONDS for posted in self._posted.values()):
            return math.inf
        return max(asked, self._answered) + self._unreachable_seconds - now

    async def _post(self, engine: Replica, path: str, body: bytes, seconds: float, most: int) -> bytes:
        """Return the reply of an engine.

        Raises:
            EngineAwayError: the engine did not accept the request.
            EngineFailedError: it accepted the request, and failed.
            TrajectoryError: it refuses the request.
        """
        url, limit = URL(engine.address) / path, aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        request = object()
        self._posted[request] = self._clock()
        try:
            async with self._session.post(
                url, data=body, headers=self._headers, timeout=limit, allow_redirects=False
            ) as response:
                status, headers = response.status, response.headers
                longest = most if status == 200 else REFUSAL_BYTES
                reply = await read_at_most(response.content, longest + 1)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            engine.failed()
            raise EngineAwayError(self._availability.report(engine.address, str(error))) from None
        except TimeoutError:
            engine.failed()
            raise EngineFailedError(f"did not answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            engine.failed()
            raise EngineFailedError(f"broke the connection ({error})") from None
        finally:
            del self._posted[request]
        problem = f"HTTP {status}: {one_line(reply[:REFUSAL_BYTES])}"
        if status > 500:
            engine.failed()
        if status > 500 or status in RETRY_STATUSES:
            engine.pause(retry_after_seconds(headers.get("Retry-After")))
            raise EngineAwayError(self._availability.report(engine.address, problem))
        self._answered = self._clock()
        self._availability.report(engine.address, "")
        if status == 500:
            engine.failed()
            raise EngineFailedError(f"answered {problem}")
        engine.succeeded()
        if len(reply) > longest and status == 200:
            raise TrajectoryError(f"pool {self._name} answered more than {longest:,} bytes; lower max_tokens")
        if status != 200:
            raise TrajectoryError(f"pool {self._name} refused a question ({problem})")
        return reply


async def _engines_at(urls: Sequence[URL]) -> Collection[str]:
    """Return the address of each engine: a name stands for the addresses of all engines that are ready.

    Raises:
        OSError: a name has no address.
    """
    found: set[str] = set()
    for url in urls:
        found |= {str(url.with_host(each)) for each in await addresses_of(url)} if has_name(url) else {str(url)}
    return found
