"""Chooses the engine that is served next, and its request."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic

from rljob.scheduling.engine_ranks import EngineRanks, Load, RankedEngine
from rljob.scheduling.request import EngineLoad, Request, RequestKind
from rljob.scheduling.waiting_requests import Entry, Order, WaitingRequests

TURN_EXCESS = 8
"""By how many requests like itself the home of a next turn may be ahead of the least loaded engine: anywhere else the
whole context is sent and computed again."""

OWN, NEXT, FOREIGN = range(3)
"""What an engine takes first if slots are scarce: requests whose home it is, requests without a home, others."""

_Found = tuple[int, int, Order, int, Request]


class EngineChoice(Generic[Load]):
    """Chooses engines and requests of one call of :meth:`RequestQueue.assign`."""

    def __init__(
        self,
        engines: EngineRanks[Load],
        kinds: dict[RequestKind, WaitingRequests],
        eligible: Callable[[Load, RequestKind], bool],
        start_groups: bool,
    ) -> None:
        self._engines = engines
        self._kinds = kinds
        self._eligible = eligible
        self._start_groups = start_groups
        self._able: dict[RequestKind, dict[Hashable, bool]] = {}
        self._open = dict.fromkeys(engines.abilities())  # whose engines may find a request
        self._closed: list[Hashable] = []
        self._skipped: dict[EngineLoad, None] = {}
        self._owners: dict[Hashable, list[RankedEngine[Load]]] = {}
        """Ability → heap of its engines that are the home of a request, if only these can find one."""
        self._number = itertools.count()
        self._last = self._floor = (False, -1.0, "")  # rank of the last engine; of the lowest that is not skipped

    # --- engines ---

    def engine(self) -> Load | None:
        """Return the engine that is served next; None if no engine can find a request."""
        lowest: RankedEngine[Load] | None = None
        for ability in list(self._open):
            entry = self._lowest(ability)
            if entry is None:
                self._close(ability)
            elif lowest is None or entry < lowest:
                lowest = entry
        if lowest is None:
            return None
        self._last = lowest[0]
        return lowest[2]

    def skip(self, engine: Load) -> None:
        """Skip an engine that found no request: assignments to other engines do not change that."""
        ability = self._engines.ability(engine)
        if not engine.busy:
            self._close(ability)  # an engine with a free slot takes any request that one of its ability can take
            return
        if ability in self._owners:
            heapq.heappop(self._owners[ability])
            return
        owners = self._only_owners(ability)
        if owners is not None:
            self._owners[ability] = owners
        else:
            self._skipped[engine] = None
            self._engines.skip(engine)

    def sent(self, request: Request, engine: Load, first: bool) -> None:
        """Note that an engine got a request; ``first``: of its group."""
        if engine in self._skipped:
            self._engines.skip(engine)
        ability = self._engines.ability(engine)
        if self._owners:
            owners = self._owners.get(ability)
            if owners and owners[0][2] is engine:
                heapq.heapreplace(owners, (engine.rank, next(self._number), engine))
        started = first and not self._start_groups and request.version is None
        of_group = request.prefix.members.items()
        if started or any(waiting and not self._is_able(ability, kind) for kind, waiting in of_group):
            self._reopen()

    def _reopen(self) -> None:
        """Consider all engines again, since other requests of a group got a home that may not run them. Those that come
        before the last one have found nothing, and are skipped."""
        self._open.update(dict.fromkeys(self._closed))
        self._closed.clear()
        self._owners.clear()
        self._floor = self._last

    def end(self) -> None:
        """Have the skipped engines ranked again."""
        for engine in self._skipped:
            engine.touch()

    def _lowest(self, ability: Hashable) -> RankedEngine[Load] | None:
        """Return the engine of an ability that is served next; None if none can find a request."""
        owners = self._owners.get(ability)
        if owners is None:
            while (entry := self._engines.first(ability)) is not None and entry[0] < self._floor:
                self._skipped[entry[2]] = None
                self._engines.skip(entry[2])
            return entry
        while owners and owners[0][2].free_slots <= 0:
            heapq.heappop(owners)
        return owners[0] if owners else None

    def _only_owners(self, ability: Hashable) -> list[RankedEngine[Load]] | None:
        """Return a heap of the engines that can find a request if all engines of an ability are busy: each takes only
        requests whose home it is. None: they may find others, or there are many homes."""
        kinds = [(kind, self._kinds[kind]) for kind in self._kinds if self._is_able(ability, kind)]
        if sum(waiting.filed for _, waiting in kinds) >= self._engines.entries(ability):
            return None
        if any(self._not_able(kind, waiting) for kind, waiting in kinds):
            return None
        homes = dict.fromkeys(home for _, waiting in kinds for home in waiting.homes_of(ability))
        ranked = [self._engines.entry(home) for home in homes]
        owners = [entry for entry in ranked if entry is not None]
        heapq.heapify(owners)
        return owners

    def _close(self, ability: Hashable) -> None:
        del self._open[ability]
        self._closed.append(ability)

    # --- requests ---

    def request(self, engine: Load, scarce: bool) -> Request | None:
        """Return the request that an engine takes next; None if there is none."""
        best: _Found | None = None
        ability, busy = self._engines.ability(engine), engine.busy
        for kind, waiting in self._kinds.items():
            if not self._is_able(ability, kind):
                continue
            own = waiting.head(engine)
            if own is not None:
                best = _lower(best, OWN, own)
                if scarce:
                    continue  # it takes that before all others
            for entry in self._not_able(kind, waiting):
                best = _lower(best, NEXT if scarce else OWN, entry)
            if busy:
                continue  # it could only hold a request of another home
            for other in waiting.abilities:
                foreign = waiting.first(other) if self._is_able(other, kind) else None
                if foreign is not None:
                    best = _lower(best, FOREIGN if scarce else OWN, foreign)
        return None if best is None else best[4]

    def _not_able(self, kind: RequestKind, waiting: WaitingRequests) -> list[Entry]:
        """Return the first requests of a kind that no eligible engine is the home of."""
        start = waiting.head(None) if self._start_groups or kind[0] is not None else None
        found = [] if start is None else [start]
        for ability in waiting.abilities:
            entry = None if self._is_able(ability, kind) else waiting.first(ability)
            if entry is not None:
                found.append(entry)
        return found

    def target(self, request: Request, engine: Load) -> Load:
        """Return the home of a request if that costs nothing, else ``engine``, the least loaded."""
        home = self._engines.member(request.home)
        if home is None or home.free_slots <= 0 or home.busy > engine.busy:
            return engine
        excess = home.tokens_per_slot - engine.tokens_per_slot
        tokens = request.prefix_tokens if request.previous is None else TURN_EXCESS * request.tokens
        able = self._is_able(self._engines.ability(home), request.kind)
        return home if able and excess <= tokens / home.max_concurrency else engine

    def _is_able(self, ability: Hashable, kind: RequestKind) -> bool:
        """Whether engines with an ability may run requests of a kind."""
        of_kind = self._able.get(kind)
        if of_kind is None:
            of_kind = self._able[kind] = {None: False}
        known = of_kind.get(ability)
        if known is None:
            engine = self._engines.example(ability)
            known = of_kind[ability] = engine is not None and self._eligible(engine, kind)
        return known


def _lower(best: _Found | None, precedence: int, entry: Entry) -> _Found:
    """Return the one of two requests that an engine takes first."""
    order, queued, request = entry
    found = (order[0], precedence, order, queued, request)
    return found if best is None or found[:4] < best[:4] else best
