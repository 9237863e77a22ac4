"""The replicas of a reward or an environment, as they come and go: which one gets the next request.

The session of an environment is one request, which ends with the session. A request goes to the replica with the fewest
requests among those that may get one. A replica gets none while its circuit breaker is open, until the time of its last
Retry-After, while it has as many requests as the limit, and while an isolated request is in flight there or waits for
the others to end. If no replica may get the request, it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rljob.runner.circuit_breaker import CircuitBreaker

log = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
LEAST_SECONDS = 0.001
"""Of a wait: the clock's resolution does not make a loop of it."""

Resolve = Callable[[], Awaitable[Collection[str]]]


class Replica:
    """One server of the service.

    Args:
        address: IP address; empty: the service's own name is used.
        clock: time in seconds.
    """

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self.address = address
        self.requests = 0  # in flight
        self.samples = 0  # of them
        self.isolated = 0  # isolated requests in flight or waiting for the others
        self._clock = clock
        self._breaker = CircuitBreaker(clock)
        self._paused_until = 0.0

    @property
    def seconds(self) -> float:
        """Time until a request may be sent."""
        return max(self._breaker.seconds, self._paused_until - self._clock(), 0.0)

    def pause(self, seconds: float) -> None:
        """Send nothing for a time, as the replica asked for (Retry-After), and up to a tenth longer, so that several
        runners do not return together."""
        self._paused_until = max(self._paused_until, self._clock() + seconds * random.uniform(1.0, 1.1))

    def succeeded(self) -> None:
        """The replica answered, if only that it refuses the request."""
        self._breaker.succeeded()

    def failed(self) -> None:
        """The replica did not answer, or failed on the request."""
        self._breaker.failed()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a request in flight."""
        self.requests += 1
        trial = self._breaker.send()
        try:
            yield
        finally:
            self.requests -= 1
            if trial:
                self._breaker.end_trial()


class ReplicaSet:
    """The replicas of one service.

    Args:
        resolve: returns the present addresses; None: the service has one address, its own name. In a cluster the
            name of a service's headless Service stands for its ready pods.
        limit: requests in flight for each replica.
    """

    def __init__(self, resolve: Resolve | None, limit: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._resolve = resolve
        self._limit = limit
        self._replicas: dict[str, Replica] = {} if resolve is not None else {"": Replica("", self._clock)}
        self._refreshed = -math.inf
        self._refreshing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._turn = itertools.count()

    @property
    def limit(self) -> int:
        """Requests in flight of all replicas together."""
        return self._limit * max(1, len(self._replicas))

    @asynccontextmanager
    async def enter(self, isolated: bool = False, avoid: Collection[str] = ()) -> AsyncIterator[Replica]:
        """Wait for a replica that may get a request; the request is in flight inside the context.

        Args:
            isolated: wait until no other request is in flight at the replica, and let none join.
            avoid: addresses that get the request only if there is no other replica.
        """
        replica = await (self._empty(avoid) if isolated else self._free(avoid))
        try:
            with replica.sending():
                yield replica
        finally:
            replica.isolated -= isolated
            self.notify()

    def spare(self, besides: Replica) -> Replica | None:
        """Return another replica that may get a request now; None: there is none."""
        return self._least(each for each in self._usable() if each is not besides)

    async def has(self, replica: Replica) -> bool:
        """Return whether a replica still exists, as far as the last resolution of the service's name shows."""
        await self._refresh()
        return self._replicas.get(replica.address) is replica

    async def close(self) -> None:
        """End the resolution of the service's name."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def _free(self, avoid: Collection[str]) -> Replica:
        while True:
            await self._refresh()
            usable = self._usable()
            others = [replica for replica in usable if replica.address not in avoid]
            if others or (usable and not self._others_exist(avoid)):
                replica = self._least(others or usable)
                assert replica is not None, "one is usable"
                return replica
            await self._wait(self._replicas.values())

    async def _empty(self, avoid: Collection[str]) -> Replica:
        while True:
            await self._refresh()
            candidates = list(self._replicas.values())
            others = [replica for replica in candidates if replica.address not in avoid]
            if not candidates:
                await self._wait(())
                continue
            replica = min(others or candidates, key=lambda each: (each.isolated, each.seconds, each.requests))
            replica.isolated += 1
            try:
                while self._replicas.get(replica.address) is replica:
                    if not replica.requests and not replica.seconds:
                        return replica
                    await self._wait([replica])
            except BaseException:  # re-raised; a cancelled request must not keep the others waiting
                replica.isolated -= 1
                self.notify()
                raise
            replica.isolated -= 1  # the replica is gone
            self.notify()

    def _usable(self) -> list[Replica]:
        return [
            each
            for each in self._replicas.values()
            if not each.isolated and each.requests < self._limit and not each.seconds
        ]

    def _others_exist(self, avoid: Collection[str]) -> bool:
        """Return whether a replica outside of ``avoid`` will be usable when requests end."""
        return any(each.address not in avoid and not each.seconds for each in self._replicas.values())

    def _least(self, replicas: Iterable[Replica]) -> Replica | None:
        """Return the replica with the fewest requests, and in turn among several."""
        found = list(replicas)
        if not found:
            return None
        least = min(each.requests for each in found)
        among = [each for each in found if each.requests == least]
        return among[next(self._turn) % len(among)]

    async def _wait(self, replicas: Iterable[Replica]) -> None:
        """Wait until a request ends, the replicas change, or the first of ``replicas`` may get a request again."""
        seconds = min((each.seconds for each in replicas if each.seconds), default=math.inf)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(seconds, LEAST_SECONDS), REFRESH_SECONDS)):
                await self._changed.wait()

    def notify(self) -> None:
        """Let waiting requests look at the replicas again, now that one has answered or a request has ended."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _refresh(self) -> None:
        """Resolve the name again if that is due; wait for it only if there is no replica yet."""
        if self._resolve is None:
            return
        if self._refreshing is None and self._clock() - self._refreshed >= REFRESH_SECONDS:
            self._refreshing = asyncio.create_task(self._resolve_again())
        if not self._replicas and self._refreshing is not None:
            await asyncio.shield(self._refreshing)

    async def _resolve_again(self) -> None:
        assert self._resolve is not None, "the caller checks it"
        try:
            addresses = await self._resolve()
        except OSError as error:  # the replicas stay: a server of names may be away too
            log.debug("the name of a service cannot be resolved: %s", error)
            addresses = ()
        finally:
            self._refreshed = self._clock()
            self._refreshing = None
        if addresses:
            self._replicas = {
                address: self._replicas.get(address) or Replica(address, self._clock) for address in sorted(addresses)
            }
            self.notify()
