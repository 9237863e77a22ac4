"""Requests to one environment service.

A session begins at the replica with the fewest sessions (:mod:`rljob.runner.service_replicas`), and all its steps go to
that replica. Requests are repeated while the replica is unavailable and after a lost connection: steps are numbered, so
a repeated request has no second effect. If the replica is gone or has lost the session, takes too long, or replies with
something other than an observation, the trajectory fails; no other trajectory is affected.

Requests and replies have the bounds of :mod:`rljob.protocol.episode_messages`. A reply is read no further than its
bound.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from rljob.api.roles import Environment
from rljob.protocol.backoff import Backoff
from rljob.protocol.episode_messages import (
    MAX_ACTION,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Observation,
    OpenSession,
    StepRequest,
    problem_of,
)
from rljob.protocol.retry_after import retry_after_seconds
from rljob.runner.context import TrajectoryError
from rljob.runner.scoring import EXTRA_SECONDS, FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS
from rljob.runner.service_http import (
    CONNECT_SECONDS,
    AvailabilityLog,
    addresses_of,
    at,
    at_replica,
    has_name,
    one_line,
    read_at_most,
)
from rljob.runner.service_replicas import Replica, ReplicaSet

log = logging.getLogger(__name__)

REFUSAL_BYTES = 1000  # of the body of a reply with another status than 200
RETRY_STATUSES = (408, 425, 429, 502, 503)
LOST_CONNECTIONS = 5
"""Lost connections of one request, each after the service accepted it, with which its trajectory fails."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Observation)


@dataclass(frozen=True)
class _Place:
    """The replica of a session. ``release`` ends the count of the session there."""

    replica: Replica
    release: AsyncExitStack


class EnvironmentClient:
    """The requests to one environment service.

    Args:
        environment: the manifest's entry.
        url: address of the service. Pods of the job are found by the addresses of its name.
        session: see :func:`rljob.runner.service_http.service_session`.
        token: sent with every request; empty: none.
    """

    def __init__(self, environment: Environment, url: str, session: aiohttp.ClientSession, token: str = "") -> None:
        self._name = environment.name
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._base = URL(f"{url.rstrip('/')}/v1/sessions")
        self._session = session
        own = environment.url is None
        self._replicas = ReplicaSet(
            functools.partial(addresses_of, self._base) if own and has_name(self._base) else None,
            environment.max_sessions if own else sys.maxsize,
        )
        self._places: dict[str, _Place] = {}
        # The service cancels a step at its own limit; only a service that hangs exceeds this one.
        self._limit = aiohttp.ClientTimeout(
            total=environment.timeout_seconds + EXTRA_SECONDS, sock_connect=CONNECT_SECONDS
        )
        self._closing: set[asyncio.Task[None]] = set()
        self._availability = AvailabilityLog(f"environment {environment.name}")
        self._closed = False

    async def open(self, opening: OpenSession) -> Observation:
        """Start an episode; return its first observation. Call :meth:`end` in every case.

        Raises:
            TrajectoryError: the service refuses or fails.
        """
        first = await self._request(opening.session, self._base, opening, 0)
        self._replicas.notify()  # it may have been the trial of a circuit breaker
        return first

    async def step(self, session: str, number: int, action: str) -> Observation:
        """Make step ``number`` of a session; return its observation.

        Raises:
            TrajectoryError: the session is lost, or the service refuses or fails.
        """
        if len(action) > MAX_ACTION:
            raise TrajectoryError(
                f"environment {self._name}: the action has {len(action):,} characters; at most {MAX_ACTION:,} are sent"
            )
        return await self._request(session, self._base / session / "steps", StepRequest(number, action), number)

    def end(self, session: str) -> None:
        """End a session without waiting for the reply. A session whose end is lost expires."""
        place = self._places.pop(session, None)
        if place is None or self._closed:
            return
        task = asyncio.create_task(self._delete(session, place))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait for the last requests."""
        self._closed = True
        await asyncio.gather(*self._closing, return_exceptions=True)
        for place in self._places.values():
            await place.release.aclose()
        await self._replicas.close()

    async def _delete(self, session: str, place: _Place) -> None:
        url, host = at_replica(self._base / session, place.replica.address)
        limit = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with place.release, self._session.delete(url, headers=self._headers | host, timeout=limit):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("environment %s: session %s was not ended: %s", self._name, session, error)

    async def _request(self, session: str, url: URL, message: OpenSession | StepRequest, step: int) -> Observation:
        body = self._encoded(message)
        backoff, lost = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS), 0
        while True:
            replica = await self._replica_of(session)
            try:
                reply = await self._post(replica, url, body)
            except ConnectionResetError as error:
                lost += 1
                if lost == LOST_CONNECTIONS:
                    raise TrajectoryError(
                        f"environment {self._name} broke the connection {lost} times at step {step} ({error})"
                    ) from None
            else:
                if reply is not None:
                    return self._checked(reply, step)
                if step == 0:  # another replica may begin the episode
                    await self._places.pop(session).release.aclose()
                elif not await self._replicas.has(replica):
                    raise TrajectoryError(
                        f"environment {self._name}: the replica{at(replica.address)} that held the session is gone"
                    )
            await backoff.wait()

    async def _replica_of(self, session: str) -> Replica:
        """Return the replica of a session; wait for one that may begin a new session."""
        if (place := self._places.get(session)) is not None:
            return place.replica
        async with AsyncExitStack() as held:
            replica = await held.enter_async_context(self._replicas.enter())
            self._places[session] = _Place(replica, held.pop_all())
        return replica

    def _encoded(self, message: OpenSession | StepRequest) -> bytes:
        """Return a request.

        Raises:
            TrajectoryError: it cannot be sent.
        """
        try:
            body = _encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TrajectoryError(f"environment {self._name}: the request cannot be sent: {error}") from error
        if len(body) > MAX_REQUEST_BYTES:
            raise TrajectoryError(
                f"environment {self._name}: the request has {len(body):,} bytes, and at most {MAX_REQUEST_BYTES:,} are "
                "sent; shorten the row"
            )
        return body

    async def _post(self, replica: Replica, url: URL, body: bytes) -> bytes | None:
        """Return the reply of a replica; None if it is unavailable.

        Raises:
            TrajectoryError: the replica refuses the request, or took too long.
            ConnectionResetError: the connection was lost after the request was sent.
        """
        url, host = at_replica(url, replica.address)
        try:
            async with self._session.post(
                url, data=body, headers=self._headers | host, timeout=self._limit, allow_redirects=False
            ) as response:
                status, replied = response.status, response.headers
                longest = MAX_REPLY_BYTES if status == 200 else REFUSAL_BYTES
                answer = await read_at_most(response.content, longest + 1)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            replica.failed()
            self._availability.report(replica.address, str(error))
            return None
        except TimeoutError:
            replica.failed()
            raise TrajectoryError(f"environment {self._name} did not answer within {self._limit.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            replica.failed()
            raise ConnectionResetError(one_line(str(error).encode(errors="replace"))) from None
        if status in RETRY_STATUSES:
            replica.pause(retry_after_seconds(replied.get("Retry-After")))
            if status != 429:  # too many sessions: others end first
                replica.failed()
                self._availability.report(replica.address, f"HTTP {status}")
            return None
        replica.succeeded()
        self._availability.report(replica.address, "")
        if status == 200 and len(answer) <= longest:
            return answer
        raise TrajectoryError(self._refusal(status, answer, longest))

    def _refusal(self, status: int, answer: bytes, longest: int) -> str:
        """Return why a reply is no observation, as one sentence."""
        if status == 200:
            return f"environment {self._name} answered more than {longest:,} bytes"
        if status in (401, 403):
            return f"environment {self._name} requires a token (HTTP {status}); rljob sends its own only"
        return f"environment {self._name}: HTTP {status}: {one_line(answer[:REFUSAL_BYTES])}"

    def _checked(self, reply: bytes, step: int) -> Observation:
        try:
            found = _decoder.decode(reply)
        except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
            raise TrajectoryError(
                f"environment {self._name} answered something else than an observation: {error}"
            ) from None
        if found.step != step:
            raise TrajectoryError(f"environment {self._name} answered for step {found.step} instead of step {step}")
        if problem := problem_of(found):
            raise TrajectoryError(f"environment {self._name} answered {problem}")
        return found
