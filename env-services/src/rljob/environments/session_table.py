"""The sessions of a service: numbered steps with repeatable replies, expiry, a limit of their number."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rljob.environments import metrics
from rljob.environments.episode import Calls, Episode
from rljob.environments.sdk_types import EpisodeError
from rljob.protocol.episode_messages import Observation, OpenSession, StepRequest
from rljob.protocol.service_routes import RequestRejectedError, busy

_encoder = msgspec.json.Encoder()


class Session:
    """One session: its episode, and the last request with its reply.

    ``last``: digest of the last request. ``reply``: its reply, or the error of the episode, or the task that makes it.
    """

    __slots__ = ("ended", "episode", "last", "name", "reply", "step", "used")

    def __init__(self, name: str, episode: Episode, last: bytes) -> None:
        self.name = name
        self.episode = episode
        self.step = 0
        self.last = last
        self.reply: bytes | EpisodeError | asyncio.Task[bytes] = b""
        self.ended = False
        self.used = 0.0


class SessionTable:
    """All sessions of a process, the least recently used first.

    Args:
        factory: makes the environment of an episode.
        calls: calls environments.
        most: sessions at a time.
        idle_seconds: a session without requests for this long is removed.
    """

    def __init__(self, factory: Callable[[], Any], calls: Calls, most: int, idle_seconds: float) -> None:
        self._factory = factory
        self._calls = calls
        self._most = most
        self._idle_seconds = idle_seconds
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, request: OpenSession) -> bytes:
        """Start an episode; return its first observation, encoded.

        Raises:
            RequestRejectedError: there are too many sessions, or the name is in use.
            EpisodeError: the environment failed.
        """
        digest = _digest(request)
        session = self._sessions.get(request.session)
        if session is not None:
            if session.last != digest:
                raise RequestRejectedError(409, f"session {request.session} exists; give every episode its own name")
            return await self._repeat(session)
        if len(self._sessions) >= self._most:
            raise busy(f"there are {len(self):,} sessions; repeat the request later, or raise maxSessions")
        session = Session(request.session, Episode(self._factory, self._calls), digest)
        self._sessions[session.name] = session
        metrics.SESSIONS.set(len(self._sessions))
        metrics.EPISODES.inc()
        self._touch(session)
        return await self._run(session, session.episode.reset, request.seed, request.row)

    async def step(self, name: str, request: StepRequest) -> bytes:
        """Make a step; return its observation, encoded.

        Raises:
            RequestRejectedError: there is no such session, or the number of the step is wrong.
            EpisodeError: the environment failed.
        """
        session = self._sessions.get(name)
        if session is None:
            raise RequestRejectedError(
                404, f"there is no session {name}: it has expired, was closed, or the service was restarted"
            )
        self._touch(session)
        digest = _digest(request)
        if request.step == session.step and digest == session.last:
            return await self._repeat(session)
        if request.step != session.step + 1:
            raise RequestRejectedError(
                409, f"session {name} is at step {session.step}; step {request.step} is not next"
            )
        if isinstance(session.reply, asyncio.Task):
            raise RequestRejectedError(409, f"session {name} has not finished step {session.step}; await its reply")
        if session.ended:
            raise RequestRejectedError(409, f"the episode of session {name} ended at step {session.step}")
        session.step, session.last = request.step, digest
        metrics.STEPS.inc()
        try:
            found = session.episode.step_here(request.action)
        except EpisodeError as error:
            self._fail(session, error)
            raise
        if found is not None:
            return self._keep(session, found)
        return await self._run(session, session.episode.step, request.action)

    def close(self, name: str) -> None:
        """End a session; one that does not exist is ended already."""
        session = self._sessions.pop(name, None)
        if session is not None:
            metrics.SESSIONS.set(len(self._sessions))
            self._end(session)

    def expire(self) -> None:
        """Remove sessions without requests for ``idle_seconds``; one that makes a step is in use."""
        limit = time.monotonic() - self._idle_seconds
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.used > limit:
                break
            if isinstance(session.reply, asyncio.Task):
                self._touch(session)
                continue
            metrics.EXPIRED.inc()
            self.close(session.name)

    async def close_all(self) -> None:
        """End all sessions."""
        for name in list(self._sessions):
            self.close(name)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _touch(self, session: Session) -> None:
        session.used = time.monotonic()
        self._sessions.move_to_end(session.name)

    async def _repeat(self, session: Session) -> bytes:
        metrics.REPEATED.inc()
        self._touch(session)
        if isinstance(session.reply, asyncio.Task):
            return await self._reply(session, session.reply)
        if isinstance(session.reply, EpisodeError):
            raise session.reply
        return session.reply

    async def _run(self, session: Session, call: Callable[..., Awaitable[Observation]], *arguments: Any) -> bytes:
        """Call the environment in a task, so that it continues if its client disconnects and asks again."""

        async def run() -> bytes:
            try:
                return self._keep(session, await call(*arguments))
            except EpisodeError as error:
                self._fail(session, error)
                raise

        session.reply = task = asyncio.create_task(run())
        return await self._reply(session, task)

    async def _reply(self, session: Session, task: asyncio.Task[bytes]) -> bytes:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RequestRejectedError(
                    404, f"session {session.name} was closed during step {session.step}"
                ) from None
            raise

    def _keep(self, session: Session, found: Observation) -> bytes:
        session.reply = reply = _encoder.encode(found)
        if found.ended:
            self._end(session)
        return reply

    def _fail(self, session: Session, error: EpisodeError) -> None:
        """Keep the error as the reply. The environment of a call that failed or hangs is not used again."""
        session.reply = error
        if error.hung:
            session.episode.abandon()
        self._end(session)

    def _end(self, session: Session) -> None:
        """Release the environment; the session stays until it is closed, so that its last request can be repeated."""
        session.ended = True
        if isinstance(session.reply, asyncio.Task):
            session.reply.cancel()
            session.episode.abandon()
        elif session.episode.closable:
            task = asyncio.create_task(session.episode.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _digest(request: msgspec.Struct) -> bytes:
    return hashlib.blake2b(_encoder.encode(request), digest_size=16).digest()
