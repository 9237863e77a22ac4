"""Assigns generation requests to engines.

A request is sent as soon as an engine has room. The engine with the fewest outstanding tokens per slot is served first;
no engine gets a request to hold while another one has a free slot for it.

Each request has a *home*: the engine that has its prefix in its cache. That is the engine of the previous turn, or the
engine that got the last request of the group. While more requests wait than slots are free, an engine takes the
requests whose home it is, then starts the next group, and takes requests of other homes only if a slot stays free
otherwise. So the requests of a group follow each other on one engine. While slots are free for all requests, balance
comes first: a request goes to its home only if the home's tokens per slot exceed those of the least loaded engine by at
most those of the prefix, which another engine computes again, and of a next turn by at most those of ``TURN_EXCESS``
such requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

import msgspec

RequestKey = tuple[str, int, int, str]
"""(sample, turn, attempt)."""

RequestKind = tuple[int | None, int]
"""(pinned version, minimum model length): requests of one kind have the same eligible engines."""

TURN_EXCESS = 8
"""By how many requests like itself the home of a next turn may be ahead of the least loaded engine: anywhere else the
whole context is sent and computed again."""

FEWEST_ENTRIES = 64
"""Entries of the heaps of a queue that are never searched for stale ones."""

OWN, NEXT, FOREIGN = range(3)
"""What an engine takes first if slots are scarce: requests whose home it is, requests without a home, others."""


@dataclass(eq=False)
class SharedPrefix:
    """The requests of one group. ``home``: the engine that got the last one; None: none was sent. ``members``: those
    that wait and are the first of their sample, by kind."""

    home: EngineLoad | None = None
    members: dict[RequestKind, dict[RequestKey, Request]] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        """Add a request that waits."""
        if request.previous is None:
            self.members.setdefault(request.kind, {})[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        if request.previous is None:
            del self.members[request.kind][request.key]


class Request(msgspec.Struct, eq=False):
    """A request for the tokens of one turn.

    ``order``: lower values are sent first. ``version``: the policy version that the engine must serve (evaluation);
    None: the current version. ``min_model_length``: the engine must support sequences of this many tokens.
    ``previous``: the engine that got the previous request of the sample; None if this is the first. ``prefix_tokens``:
    those of ``tokens`` that its home has. ``kind``: the attributes that decide which engines are eligible; derived.
    """

    key: RequestKey
    prefix: SharedPrefix
    order: tuple[int, int, int]
    tokens: int  # prompt plus maximum response
    version: int | None = None
    min_model_length: int = 0
    previous: EngineLoad | None = None
    prefix_tokens: int = 0
    engine: EngineLoad | None = None  # the engine that holds the request
    queued: bool = False
    kind: RequestKind = (None, 0)

    def __post_init__(self) -> None:
        self.kind = (self.version, self.min_model_length)

    @property
    def home(self) -> EngineLoad | None:
        """The engine that has the prefix; None: the request starts its group."""
        return self.previous or self.prefix.home


_order = attrgetter("order")
_Entry = tuple[tuple[int, int, int], int, Request]
_Heaps = dict["EngineLoad | None", list[_Entry]]


@dataclass(eq=False)
class EngineLoad:
    """The requests of one engine. An engine holds somewhat more requests than it runs concurrently, so that it never
    waits for a network round trip."""

    instance: str
    max_concurrency: int
    max_model_length: int  # tokens
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    tokens: int = 0
    capacity: int = field(init=False)  # requests that the engine runs or holds

    def __post_init__(self) -> None:
        self.capacity = self.max_concurrency + max(4, self.max_concurrency // 4)

    @property
    def free_slots(self) -> int:
        """How many more requests the engine accepts now, to run or to hold."""
        return self.capacity - len(self.requests)

    @property
    def busy(self) -> bool:
        """Whether all slots are taken: the engine holds further requests until one is free."""
        return len(self.requests) >= self.max_concurrency

    @property
    def tokens_per_slot(self) -> float:
        """Outstanding tokens per slot."""
        return self.tokens / self.max_concurrency

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Sort key: the engine that is served first is the lowest."""
        return (self.busy, self.tokens_per_slot, self.instance)

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


@dataclass
class Affinity:
    """Requests that were sent and had a home, and how many of them were sent to it."""

    sent: int = 0
    at_home: int = 0

    @property
    def share(self) -> float:
        """Fraction that was sent to the home; 1 if none had one."""
        return self.at_home / self.sent if self.sent else 1.0


class RequestQueue:
    """Requests that wait for an engine, lowest order first. Each kind has its own heaps, so that a request without an
    eligible engine does not block requests of other kinds.

    ``members``: the affinity of first requests of a sample to the engine of their group. ``turns``: of later requests
    of a sample to the engine of the request before.
    """

    def __init__(self) -> None:
        self._kinds: dict[RequestKind, _Heaps] = {}
        self._tie = itertools.count()
        self._live = 0
        self._entries = 0  # of all heaps, also those of requests that are not queued any more
        self.members, self.turns = Affinity(), Affinity()

    def __len__(self) -> int:
        return self._live

    def put(self, request: Request) -> None:
        """Add a request."""
        request.queued = True
        self._live += 1
        request.prefix.add(request)
        self._push(request)

    def cancel(self, request: Request) -> None:
        """Remove a request from the queue if it is queued."""
        if request.queued:
            self._take(request)
            self._push_next(request.prefix)

    def _take(self, request: Request) -> None:
        request.queued = False
        self._live -= 1
        request.prefix.remove(request)

    def _push_next(self, prefix: SharedPrefix) -> None:
        """Have the next members of a group in the heaps of its home. Those after them are still in heaps of earlier
        homes: while slots are free, the home of a group changes with nearly every member."""
        for members in prefix.members.values():
            if members:
                self._push(min(members.values(), key=_order))

    def _push(self, request: Request) -> None:
        if self._entries > FEWEST_ENTRIES + 4 * self._live:
            self._remove_stale()
        heap = self._kinds.setdefault(request.kind, {}).setdefault(request.home, [])
        heapq.heappush(heap, (request.order, next(self._tie), request))
        self._entries += 1

    def _remove_stale(self) -> None:
        """Remove entries that count no more: of cancelled requests, and of earlier homes. Others than the next members
        of their groups may be lost with them; those are pushed when they are the next."""
        self._entries = 0
        for kind, heaps in list(self._kinds.items()):
            for home, heap in list(heaps.items()):
                valid = {entry[2]: entry for entry in heap if entry[2].queued and entry[2].home is home}
                heap[:] = sorted(valid.values(), key=itemgetter(0, 1))
                self._entries += len(heap)
                if not heap:
                    del heaps[home]
            if not heaps:
                del self._kinds[kind]

    def assign(
        self, engines: Iterable[Load], eligible: Callable[[Load, RequestKind], bool], start_groups: bool = True
    ) -> Iterator[tuple[Request, Load]]:
        """Yield (request, engine) for each assignment, until no eligible engine has a free slot.

        Args:
            engines: candidates; an assigned request is added to its engine.
            eligible: whether an engine may run requests of a kind; asked once for each engine and kind.
            start_groups: whether requests without a home are sent; those with a pinned version always are.
        """
        if not self._live:
            return
        present = {engine.instance: engine for engine in engines}
        with_room = [engine for engine in present.values() if len(engine.requests) < engine.capacity]
        able = _Eligibility(present, eligible)
        ranked = [(engine.rank, engine) for engine in with_room]
        heapq.heapify(ranked)
        outranked = set[Load]()  # engines that got a request as the home of one since they were ranked
        free = sum(max(0, engine.max_concurrency - len(engine.requests)) for engine in with_room)
        while ranked and self._live:
            _, engine = heapq.heappop(ranked)
            if engine in outranked:
                outranked.discard(engine)
                if engine.free_slots > 0:
                    heapq.heappush(ranked, (engine.rank, engine))
                continue
            found = self._next_for(engine, able, scarce=self._live > free, start_groups=start_groups)
            if found is None:
                continue  # nothing for it: assignments to other engines do not change that
            target = self._home_of(found, engine, able)
            free -= not target.busy
            self._sent(found, target)
            if target is not engine:
                outranked.add(target)
            if engine.free_slots > 0:
                heapq.heappush(ranked, (engine.rank, engine))
            yield found, target

    def _sent(self, request: Request, engine: EngineLoad) -> None:
        """Add a request to an engine, which becomes the home of its group."""
        home = request.home
        if home is not None:
            affinity = self.members if request.previous is None else self.turns
            affinity.sent += 1
            affinity.at_home += home is engine
        self._take(request)
        engine.add(request)
        request.prefix.home = engine
        self._push_next(request.prefix)

    def _next_for(self, engine: Load, able: _Eligibility[Load], scarce: bool, start_groups: bool) -> Request | None:
        """Return the request that an engine takes next; None if there is none."""
        best: tuple[tuple[int, int, tuple[int, int, int]], Request] | None = None
        for kind in list(self._kinds):
            if not able(engine, kind):
                continue
            for home in self._homes(kind, engine, scarce):
                request = self._head(kind, home)
                if request is None or (home is None and kind[0] is None and not start_groups):
                    continue
                precedence = OWN if home is engine else FOREIGN if home is not None and able(home, kind) else NEXT
                if precedence == FOREIGN and engine.busy:
                    continue  # it could only hold it
                found = (request.order[0], precedence if scarce else OWN, request.order)
                if best is None or found < best[0]:
                    best = (found, request)
        return None if best is None else best[1]

    def _homes(self, kind: RequestKind, engine: EngineLoad, scarce: bool) -> list[EngineLoad | None]:
        """Return the homes whose first request an engine may take: its own if it takes that before all others."""
        heaps = self._kinds[kind]
        if scarce and engine in heaps and self._head(kind, engine) is not None:
            return [engine]
        return list(heaps)

    def _head(self, kind: RequestKind, home: EngineLoad | None) -> Request | None:
        """Return the first queued request of a kind with a home; None if there is none."""
        heaps = self._kinds[kind]
        heap = heaps[home]
        while heap:
            request = heap[0][2]
            if request.queued and request.home is home:
                return request
            heapq.heappop(heap)
            self._entries -= 1
        del heaps[home]
        if not heaps:
            del self._kinds[kind]
        return None

    @staticmethod
    def _home_of(request: Request, engine: Load, able: _Eligibility[Load]) -> Load:
        """Return the home of a request if that costs nothing, else ``engine``, the least loaded."""
        wanted = request.home
        home = able.present.get(wanted.instance) if wanted is not None else None
        if home is None or home is not wanted or home.free_slots <= 0 or home.busy > engine.busy:
            return engine
        excess = home.tokens_per_slot - engine.tokens_per_slot
        tokens = request.prefix_tokens if request.previous is None else TURN_EXCESS * request.tokens
        return home if able(home, request.kind) and excess <= tokens / home.max_concurrency else engine


class _Eligibility(Generic[Load]):
    """Whether engines may run requests of a kind, asked once; never for engines that are not ``present``."""

    def __init__(self, present: Mapping[str, Load], eligible: Callable[[Load, RequestKind], bool]) -> None:
        self.present = present
        self._eligible = eligible
        self._known: dict[tuple[EngineLoad, RequestKind], bool] = {}

    def __call__(self, engine: EngineLoad, kind: RequestKind) -> bool:
        key = (engine, kind)
        known = self._known.get(key)
        if known is None:
            found = self.present.get(engine.instance)
            known = self._known[key] = found is not None and found is engine and self._eligible(found, kind)
        return known
