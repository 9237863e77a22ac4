"""Keeps engines in the order in which they are served, from one assignment of requests to the next.

Engines with the same *ability* may run the same kinds of requests; each ability has a heap. An engine that changes adds
itself to its ``watchers``, and :meth:`EngineRanks.refresh` ranks it again: its entry before counts no more, and is
removed when it is the lowest. So the cost of an assignment does not depend on the number of engines.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rljob.scheduling.request import EngineLoad

Load = TypeVar("Load", bound=EngineLoad)
RankedEngine = tuple[tuple[bool, float, str], int, Load]
"""(rank, number, engine): the lowest is served first."""

FEWEST_ENTRIES = 64
"""Entries of heaps that are never searched for those that count no more."""


@dataclass(eq=False)
class _Place(Generic[Load]):
    """What is kept of a present engine. ``entry``: the one that counts; None: it has no room, or is skipped."""

    engine: Load
    ability: Hashable = None
    free: int = 0
    entry: RankedEngine[Load] | None = None


class EngineRanks(Generic[Load]):
    """The engines of a queue of requests.

    ``free``: how many more requests the present engines would run at once. All is as of the last :meth:`refresh`.
    """

    def __init__(self) -> None:
        self.free = 0
        self._members: dict[Load, None] = {}
        self._changed: dict[Load, None] = {}
        self._places: dict[EngineLoad, _Place[Load]] = {}  # of present engines
        self._able: dict[Hashable, dict[Load, None]] = {}  # ability → present engines
        self._heaps: dict[Hashable, list[RankedEngine[Load]]] = {}
        self._number = itertools.count()

    def add(self, engine: Load) -> None:
        """Add an engine."""
        self._members[engine] = None
        engine.watch(self._changed)

    def remove(self, engine: Load) -> None:
        """Remove an engine."""
        del self._members[engine]
        engine.unwatch(self._changed)

    # --- changes ---

    def refresh(self) -> list[Load]:
        """Rank the engines that changed; return those whose ability changed."""
        moved: list[Load] = []
        while self._changed:
            engine, _ = self._changed.popitem()
            place = self._places.get(engine) or _Place(engine)
            present = engine in self._members and engine.present
            ability = engine.ability if present else None
            if ability != place.ability:
                moved.append(engine)
                self._move(engine, place.ability, ability)
                place.ability = ability
            running = len(engine.requests)
            free = max(0, engine.max_concurrency - running) if present else 0
            self.free += free - place.free
            place.free, place.entry = free, None
            if not present:
                self._places.pop(engine, None)
                continue
            self._places[engine] = place
            if ability is not None and running < engine.capacity:
                place.entry = (engine.rank, next(self._number), engine)
                self._push(ability, place.entry)
        return moved

    def _move(self, engine: Load, before: Hashable, ability: Hashable) -> None:
        if before is not None:
            del self._able[before][engine]
            if not self._able[before]:
                del self._able[before]
        if ability is not None:
            self._able.setdefault(ability, {})[engine] = None

    def _push(self, ability: Hashable, entry: RankedEngine[Load]) -> None:
        heap = self._heaps.get(ability)
        if heap is None:
            heap = self._heaps[ability] = []
        if len(heap) > FEWEST_ENTRIES + 4 * len(self._able[ability]):
            heap[:] = [entry for entry in heap if self.entry(entry[2]) is entry]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def skip(self, engine: EngineLoad) -> None:
        """Do not rank an engine until it changes."""
        self._places[engine].entry = None

    # --- queries ---

    def ability(self, engine: EngineLoad) -> Hashable:
        """Return the ability of an engine; None: it gets no requests, or is not present."""
        place = self._places.get(engine)
        return None if place is None else place.ability

    def member(self, engine: EngineLoad | None) -> Load | None:
        """Return an engine if it is present, else None."""
        place = None if engine is None else self._places.get(engine)
        return None if place is None else place.engine

    def example(self, ability: Hashable) -> Load | None:
        """Return any engine with an ability; None if there is none."""
        return next(iter(self._able.get(ability, ())), None)

    def available(self) -> list[Load]:
        """Return the engines that may get requests."""
        return [engine for engines in self._able.values() for engine in engines]

    def abilities(self) -> list[Hashable]:
        """Return the abilities that engines with room may have."""
        return list(self._heaps)

    def entries(self, ability: Hashable) -> int:
        """Return how many engines with an ability may be ranked, or more."""
        return len(self._heaps.get(ability, ()))

    def entry(self, engine: EngineLoad) -> RankedEngine[Load] | None:
        """Return the entry of an engine; None: it is not present, has no room, or is skipped."""
        place = self._places.get(engine)
        return None if place is None else place.entry

    def first(self, ability: Hashable) -> RankedEngine[Load] | None:
        """Return the lowest entry of the engines with an ability; None if there is none."""
        heap = self._heaps.get(ability)
        while heap:
            if self.entry(heap[0][2]) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
        self._heaps.pop(ability, None)
        return None
