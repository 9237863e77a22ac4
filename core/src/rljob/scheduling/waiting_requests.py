"""Requests of one kind that wait for an engine: the first of each home, and the first of all homes of one ability.

A request is in the heap of its home. Heaps also have entries that count no more: of requests that do not wait any
longer, and of earlier homes; they are removed when they are the first. The first request of each home is *filed* under
the ability of the home. What is filed for a home is at most as late as its first request: if it counts no more when it
is the first of its ability, the first request of the home is filed instead.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter

from rljob.scheduling.request import EngineLoad, Request

Order = tuple[int, int, int]
Entry = tuple[Order, int, Request]
"""(order, time of queueing, request)."""
_Filed = tuple[Order, int, int, EngineLoad]


class WaitingRequests:
    """The requests of one kind; ``home`` None: they start their group.

    Args:
        ability: returns the ability of a home; the homes whose ability changes must be passed to :meth:`move`.
    """

    def __init__(self, ability: Callable[[EngineLoad], Hashable]) -> None:
        self._ability = ability
        self._heaps: dict[EngineLoad | None, list[Entry]] = {}
        self._filed: dict[EngineLoad, _Filed] = {}
        self._firsts: dict[Hashable, list[_Filed]] = {}
        self._number = itertools.count()
        self.entries = 0  # of all heaps

    @property
    def filed(self) -> int:
        """The number of homes that have an entry."""
        return len(self._filed)

    @property
    def abilities(self) -> list[Hashable]:
        """The abilities under which something is filed."""
        return list(self._firsts)

    def push(self, entry: Entry) -> None:
        """Add a request that waits, under its home."""
        home = entry[2].home
        heapq.heappush(self._heaps.setdefault(home, []), entry)
        self.entries += 1
        if home is not None:
            filed = self._filed.get(home)
            if filed is None or entry[:2] < filed[:2]:
                self._file(home, entry)

    def head(self, home: EngineLoad | None) -> Entry | None:
        """Return the first request of a home; None if there is none."""
        heap = self._heaps.get(home)
        if heap is None:
            return None
        while heap:
            request = heap[0][2]
            if request.queued and request.home is home:
                return heap[0]
            heapq.heappop(heap)
            self.entries -= 1
        del self._heaps[home]
        if home is not None:
            self._filed.pop(home, None)
        return None

    def first(self, ability: Hashable) -> Entry | None:
        """Return the first request of the homes with an ability; None if there is none."""
        heap = self._firsts.get(ability, [])
        while heap:
            home = heap[0][3]
            counts = self._filed.get(home) is heap[0]
            head = self.head(home) if counts else None
            if head is not None and head[1] == heap[0][1]:
                return head
            heapq.heappop(heap)
            self.entries -= 1
            if head is not None:
                self._file(home, head)
        self._firsts.pop(ability, None)
        return None

    def homes_of(self, ability: Hashable) -> Iterator[EngineLoad]:
        """Yield the homes with an ability that have a request."""
        for home in list(self._filed):
            if self._ability(home) == ability and self.head(home) is not None:
                yield home

    def move(self, home: EngineLoad) -> None:
        """File the first request of a home whose ability changed."""
        head = self.head(home)
        if head is not None:
            self._file(home, head)

    def _file(self, home: EngineLoad, entry: Entry) -> None:
        filed = self._filed[home] = (entry[0], entry[1], next(self._number), home)
        heapq.heappush(self._firsts.setdefault(self._ability(home), []), filed)
        self.entries += 1

    def remove_stale(self) -> None:
        """Remove the entries that count no more. Others than the next members of their groups may be lost with them;
        those are pushed when they are the next."""
        self._firsts.clear()
        self._filed.clear()
        self.entries = 0
        for home, heap in list(self._heaps.items()):
            valid = {entry[2]: entry for entry in heap if entry[2].queued and entry[2].home is home}
            heap[:] = sorted(valid.values(), key=itemgetter(0, 1))
            self.entries += len(heap)
            if not heap:
                del self._heaps[home]
            elif home is not None:
                self._file(home, heap[0])
