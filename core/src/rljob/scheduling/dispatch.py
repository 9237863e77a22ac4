"""Which engine gets which generation request.

A request goes out the moment an engine has room, to the engine with the fewest outstanding tokens. A group's requests
prefer one engine (prefix cache) while that costs nothing: while it is no fuller than the emptiest by one request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

PartKey = tuple[str, int, int]
"""(sample, turn, attempt)."""

MOST_IN_VAIN = 64
"""Requests in a row that no open engine may have, after which the queue is not walked further: the rest is alike."""


@dataclass(eq=False)
class Request:
    """A turn that wants tokens. ``order``: lower goes first; ``version``: only an engine that serves exactly this
    policy version will do (evaluation), None: the current one."""

    key: PartKey
    group: str
    order: tuple[int, int, int]
    tokens: int  # prompt plus longest answer
    version: int | None = None
    engine: str | None = None
    queued: bool = False


@dataclass(eq=False)
class EngineLoad:
    """What an engine has in hand. It is given somewhat more requests than it runs at a time, so that it never waits
    for the next one to travel."""

    instance: str
    max_concurrency: int
    requests: dict[PartKey, Request] = field(default_factory=dict)
    tokens: int = 0

    @property
    def room(self) -> int:
        """Requests it can be given now."""
        return self.max_concurrency + max(4, self.max_concurrency // 4) - len(self.requests)

    def add(self, request: Request) -> None:
        """Give it a request."""
        self.requests[request.key] = request
        self.tokens += request.tokens
        request.engine = self.instance

    def remove(self, key: PartKey) -> Request | None:
        """Take a request back; None when it does not have it."""
        request = self.requests.pop(key, None)
        if request is not None:
            self.tokens -= request.tokens
            request.engine = None
        return request


class Queue:
    """Requests that wait for an engine, lowest order first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Request]] = []
        self._tie = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def put(self, request: Request) -> None:
        """Add a request."""
        request.queued = True
        heapq.heappush(self._heap, (request.order, next(self._tie), request))
        self._live += 1

    def cancel(self, request: Request) -> None:
        """Take a request out for good, if it waits."""
        if request.queued:
            request.queued = False
            self._live -= 1

    def assign(
        self, engines: Iterable[EngineLoad], eligible: Callable[[EngineLoad, Request], bool]
    ) -> Iterator[tuple[Request, EngineLoad]]:
        """Yield requests with the engine each was given to, until no engine has room for what is left."""
        open_engines = [engine for engine in engines if engine.room > 0]
        last: dict[str, EngineLoad] = {}
        kept: list[tuple[tuple[int, int, int], int, Request]] = []
        in_vain = 0
        while self._heap and open_engines:
            entry = heapq.heappop(self._heap)
            request = entry[2]
            if not request.queued:
                continue
            able = [engine for engine in open_engines if eligible(engine, request)]
            if not able:
                kept.append(entry)
                in_vain += 1
                if in_vain > MOST_IN_VAIN:
                    break
                continue
            in_vain = 0
            engine = min(able, key=lambda e: (e.tokens / e.max_concurrency, e.instance))
            favourite = last.get(request.group)
            if favourite in able and favourite is not None and favourite.tokens - engine.tokens <= request.tokens:
                engine = favourite
            last[request.group] = engine
            engine.add(request)
            request.queued = False
            self._live -= 1
            if engine.room <= 0:
                open_engines.remove(engine)
            yield request, engine
        for entry in kept:
            heapq.heappush(self._heap, entry)
