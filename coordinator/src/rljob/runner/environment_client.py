"""Requests to one environment service.

Requests are repeated while the service is unavailable and after a lost connection: steps are numbered, so a repeated
request has no second effect. If the service has lost the session, takes too long, or replies with something other than
an observation, the trajectory fails; no other trajectory is affected.

Requests and replies have the bounds of :mod:`rljob.protocol.episode_messages`. A reply is read no further than its
bound.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

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
from rljob.runner.context import TrajectoryError
from rljob.runner.scoring import EXTRA_SECONDS, FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS
from rljob.runner.service_http import CONNECT_SECONDS, AvailabilityLog, one_line, read_at_most

log = logging.getLogger(__name__)

REFUSAL_BYTES = 1000  # of the body of a reply with another status than 200
RETRY_STATUSES = (408, 425, 429, 502, 503)
LOST_CONNECTIONS = 5
"""Lost connections of one request, each after the service accepted it, with which its trajectory fails."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Observation)


class EnvironmentClient:
    """The requests to one environment service.

    Args:
        environment: the manifest's entry.
        url: address of the service.
        session: see :func:`rljob.runner.service_http.service_session`.
        token: sent with every request; empty: none.
    """

    def __init__(self, environment: Environment, url: str, session: aiohttp.ClientSession, token: str = "") -> None:
        self._name = environment.name
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._base = f"{url.rstrip('/')}/v1/sessions"
        self._session = session
        # The service cancels a step at its own limit; only a service that hangs exceeds this one.
        self._limit = aiohttp.ClientTimeout(
            total=environment.timeout_seconds + EXTRA_SECONDS, sock_connect=CONNECT_SECONDS
        )
        self._closing: set[asyncio.Task[None]] = set()
        self._availability = AvailabilityLog(f"environment {environment.name}")
        self._closed = False

    async def open(self, opening: OpenSession) -> Observation:
        """Start an episode; return its first observation.

        Raises:
            TrajectoryError: the service refuses or fails.
        """
        return await self._request(self._base, opening, 0)

    async def step(self, session: str, number: int, action: str) -> Observation:
        """Make step ``number`` of a session; return its observation.

        Raises:
            TrajectoryError: the session is lost, or the service refuses or fails.
        """
        if len(action) > MAX_ACTION:
            raise TrajectoryError(
                f"environment {self._name}: the action has {len(action):,} characters; at most {MAX_ACTION:,} are sent"
            )
        return await self._request(f"{self._base}/{session}/steps", StepRequest(number, action), number)

    def end(self, session: str) -> None:
        """End a session without waiting for the reply. A session whose end is lost expires."""
        if self._closed:
            return
        task = asyncio.create_task(self._delete(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait for the last requests."""
        self._closed = True
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _delete(self, session: str) -> None:
        limit = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with self._session.delete(f"{self._base}/{session}", headers=self._headers, timeout=limit):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("environment %s: session %s was not ended: %s", self._name, session, error)

    async def _request(self, url: str, message: OpenSession | StepRequest, step: int) -> Observation:
        try:
            body = _encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TrajectoryError(f"environment {self._name}: the request cannot be sent: {error}") from error
        if len(body) > MAX_REQUEST_BYTES:
            raise TrajectoryError(
                f"environment {self._name}: the request has {len(body):,} bytes, and at most {MAX_REQUEST_BYTES:,} are "
                "sent; shorten the row"
            )
        backoff, lost = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS), 0
        while True:
            try:
                reply = await self._post(url, body)
            except ConnectionResetError as error:
                lost += 1
                if lost == LOST_CONNECTIONS:
                    raise TrajectoryError(
                        f"environment {self._name} broke the connection {lost} times at step {step} ({error})"
                    ) from None
                reply = None
            if reply is not None:
                return self._checked(reply, step)
            await backoff.wait()

    async def _post(self, url: str, body: bytes) -> bytes | None:
        """Return the reply of the service; None if it is unavailable.

        Raises:
            TrajectoryError: the service refuses the request, or took too long.
            ConnectionResetError: the connection was lost after the request was sent.
        """
        try:
            async with self._session.post(
                url, data=body, headers=self._headers, timeout=self._limit, allow_redirects=False
            ) as response:
                status = response.status
                longest = MAX_REPLY_BYTES if status == 200 else REFUSAL_BYTES
                answer = await read_at_most(response.content, longest + 1)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._availability.report("", str(error))
            return None
        except TimeoutError:
            raise TrajectoryError(f"environment {self._name} did not answer within {self._limit.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionResetError(one_line(str(error).encode(errors="replace"))) from None
        if status in RETRY_STATUSES:
            if status != 429:  # too many sessions: others end first
                self._availability.report("", f"HTTP {status}")
            return None
        self._availability.report("", "")
        if status == 200 and len(answer) <= longest:
            return answer
        if status == 200:
            raise TrajectoryError(f"environment {self._name} answered more than {longest:,} bytes")
        if status in (401, 403):
            raise TrajectoryError(
                f"environment {self._name} requires a token (HTTP {status}); rljob sends its own only"
            )
        raise TrajectoryError(f"environment {self._name}: HTTP {status}: {one_line(answer[:REFUSAL_BYTES])}")

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
