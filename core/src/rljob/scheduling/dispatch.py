"""Which engine gets which generation request.

A request goes out the moment an engine has room, to the engine with the fewest outstanding tokens. A group's requests
prefer one engine (prefix cache) while that costs nothing: while it is no fuller than the emptiest by one request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

RequestKey = tuple[str, int, int]
"""(sample, turn, attempt)."""

Kind = tuple[int | None, int]
"""(pinned version, shortest engine): what decides which engines may have a request."""


@dataclass(eq=False)
class Request:
    """A turn that wants tokens. ``order``: lower goes first; ``version``: only an engine that serves exactly this
    policy version will do (evaluation), None: the current one; ``shortest``: only an engine that takes sequences of
    so many tokens will do."""

    key: RequestKey
    group: str
    order: tuple[int, int, int]
    tokens: int  # prompt plus longest answer
    version: int | None = None
    shortest: int = 0
    engine: EngineLoad | None = None  # that has it in hand
    queued: bool = False

    @property
    def kind(self) -> Kind:
        """Requests of a kind may have the same engines."""
        return (self.version, self.shortest)


_Entry = tuple[tuple[int, int, int], int, Request]


@dataclass(eq=False)
class EngineLoad:
    """What an engine has in hand. It is given somewhat more requests than it runs at a time, so that it never waits
    for the next one to travel."""

    instance: str
    max_concurrency: int
    max_model_length: int  # tokens
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    tokens: int = 0

    @property
    def room(self) -> int:
        """Requests it can be given now."""
        return self.max_concurrency + max(4, self.max_concurrency // 4) - len(self.requests)

    def add(self, request: Request) -> None:
        """Give it a request."""
        self.requests[request.key] = request
        self.tokens += request.tokens
        request.engine = self

    def remove(self, key: RequestKey) -> Request | None:
        """Take a request back; None when it does not have it."""
        request = self.requests.pop(key, None)
        if request is not None:
            self.tokens -= request.tokens
            request.engine = None
        return request


Load = TypeVar("Load", bound=EngineLoad)


class RequestQueue:
    """Requests that wait for an engine, lowest order first. Those of a kind wait in one heap: what no engine may have
    now holds up nothing else."""

    def __init__(self) -> None:
        self._heaps: dict[Kind, list[_Entry]] = {}
        self._tie = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def put(self, request: Request) -> None:
        """Add a request."""
        request.queued = True
        heapq.heappush(self._heaps.setdefault(request.kind, []), (request.order, next(self._tie), request))
        self._live += 1

    def cancel(self, request: Request) -> None:
        """Take a request out for good, if it waits."""
        if request.queued:
            request.queued = False
            self._live -= 1

    def assign(
        self, engines: Iterable[Load], eligible: Callable[[Load, Request], bool]
    ) -> Iterator[tuple[Request, Load]]:
        """Yield requests with the engine each was given to, until no engine has room for what is left. ``eligible``
        must answer alike for all requests of a kind."""
        open_engines = [engine for engine in engines if engine.room > 0]
        last: dict[str, Load] = {}
        while open_engines:
            found = self._next(open_engines, eligible)
            if found is None:
                return
            request, able = found
            engine = min(able, key=lambda e: (e.tokens / e.max_concurrency, e.instance))
            favourite = last.get(request.group)
            if favourite in able and favourite is not None and favourite.tokens - engine.tokens <= request.tokens:
                engine = favourite
            last[request.group] = engine
            engine.add(request)
            self.cancel(request)
            if engine.room <= 0:
                open_engines.remove(engine)
            yield request, engine

    def _next(
        self, engines: list[Load], eligible: Callable[[Load, Request], bool]
    ) -> tuple[Request, list[Load]] | None:
        """Return the first request that one of ``engines`` may have, and those that may."""
        heads = sorted(head for kind in list(self._heaps) if (head := self._head(kind)) is not None)
        for _, _, request in heads:
            able = [engine for engine in engines if eligible(engine, request)]
            if able:
                return request, able
        return None

    def _head(self, kind: Kind) -> _Entry | None:
        """Return the first of a kind that still waits."""
        heap = self._heaps[kind]
        while heap and not heap[0][2].queued:
            heapq.heappop(heap)
        if heap:
            return heap[0]
        del self._heaps[kind]
        return None
