"""Assigns generation requests to engines.

A request is sent as soon as an engine has room, to the engine with the fewest outstanding tokens per slot, and only if
no engine has a free slot to one that holds it until a slot is free. The requests of a group go to the same engine
(prefix cache) as long as its tokens per slot exceed those of the least loaded engine by at most those of the request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

RequestKey = tuple[str, int, int]
"""(sample, turn, attempt)."""

RequestKind = tuple[int | None, int]
"""(pinned version, minimum model length): requests of one kind have the same eligible engines."""


@dataclass(eq=False)
class Request:
    """A request for the tokens of one turn.

    ``order``: lower values are sent first. ``version``: the policy version that the engine must serve (evaluation);
    None: the current version. ``min_model_length``: the engine must support sequences of this many tokens.
    """

    key: RequestKey
    group: str
    order: tuple[int, int, int]
    tokens: int  # prompt plus maximum response
    version: int | None = None
    min_model_length: int = 0
    engine: EngineLoad | None = None  # the engine that holds the request
    queued: bool = False

    @property
    def kind(self) -> RequestKind:
        """The attributes that decide which engines are eligible."""
        return (self.version, self.min_model_length)


_Entry = tuple[tuple[int, int, int], int, Request]


@dataclass(eq=False)
class EngineLoad:
    """The requests of one engine. An engine holds somewhat more requests than it runs concurrently, so that it never
    waits for a network round trip."""

    instance: str
    max_concurrency: int
    max_model_length: int  # tokens
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    tokens: int = 0

    @property
    def free_slots(self) -> int:
        """How many more requests the engine accepts now, to run or to hold."""
        return self.max_concurrency + max(4, self.max_concurrency // 4) - len(self.requests)

    @property
    def busy(self) -> bool:
        """Whether all slots are taken: the engine holds further requests until one is free."""
        return len(self.requests) >= self.max_concurrency

    @property
    def tokens_per_slot(self) -> float:
        """Outstanding tokens per slot."""
        return self.tokens / self.max_concurrency

    def add(self, request: Request) -> None:
        """Assign a request to the engine."""
        self.requests[request.key] = request
        self.tokens += request.tokens
        request.engine = self

    def remove(self, key: RequestKey) -> Request | None:
        """Remove and return a request; None if the engine does not hold it."""
        request = self.requests.pop(key, None)
        if request is not None:
            self.tokens -= request.tokens
            request.engine = None
        return request


Load = TypeVar("Load", bound=EngineLoad)


class RequestQueue:
    """Requests that wait for an engine, lowest order first. Each kind has its own heap, so that a request without an
    eligible engine does not block requests of other kinds."""

    def __init__(self) -> None:
        self._heaps: dict[RequestKind, list[_Entry]] = {}
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
        """Remove a request from the queue if it is queued."""
        if request.queued:
            request.queued = False
            self._live -= 1

    def assign(
        self, engines: Iterable[Load], eligible: Callable[[Load, Request], bool]
    ) -> Iterator[tuple[Request, Load]]:
        """Yield (request, engine) for each assignment, until no eligible engine has a free slot.

        Args:
            engines: candidates; an assigned request is added to its engine.
            eligible: whether an engine may run a request; the result must be equal for all requests of one kind.
        """
        open_engines = [engine for engine in engines if engine.free_slots > 0]
        last: dict[str, Load] = {}
        while open_engines:
            found = self._next(open_engines, eligible)
            if found is None:
                return
            request, candidates = found
            engine = min(candidates, key=lambda e: (e.busy, e.tokens_per_slot, e.instance))
            preferred = last.get(request.group)
            if preferred in candidates and preferred is not None and preferred.busy <= engine.busy:
                excess = preferred.tokens_per_slot - engine.tokens_per_slot
                if excess <= request.tokens / preferred.max_concurrency:
                    engine = preferred
            last[request.group] = engine
            engine.add(request)
            self.cancel(request)
            if engine.free_slots <= 0:
                open_engines.remove(engine)
            yield request, engine

    def _next(
        self, engines: list[Load], eligible: Callable[[Load, Request], bool]
    ) -> tuple[Request, list[Load]] | None:
        """Return the first request with an eligible engine among ``engines``, and its eligible engines."""
        heads = sorted(head for kind in list(self._heaps) if (head := self._head(kind)) is not None)
        for _, _, request in heads:
            candidates = [engine for engine in engines if eligible(engine, request)]
            if candidates:
                return request, candidates
        return None

    def _head(self, kind: RequestKind) -> _Entry | None:
        """Return the first queued request of a kind; None if there is none."""
        heap = self._heaps[kind]
        while heap and not heap[0][2].queued:
            heapq.heappop(heap)
        if heap:
            return heap[0]
        del self._heaps[kind]
        return None
