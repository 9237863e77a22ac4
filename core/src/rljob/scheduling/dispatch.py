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

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic

from rljob.scheduling.engine_choice import EngineChoice
from rljob.scheduling.engine_ranks import FEWEST_ENTRIES, EngineRanks, Load
from rljob.scheduling.request import EngineLoad, Request, RequestKind, SharedPrefix
from rljob.scheduling.waiting_requests import WaitingRequests

_order = attrgetter("order")


@dataclass
class Affinity:
    """Requests that were sent and had a home, and how many of them were sent to it."""

    sent: int = 0
    at_home: int = 0

    @property
    def share(self) -> float:
        """Fraction that was sent to the home; 1 if none had one."""
        return self.at_home / self.sent if self.sent else 1.0


class RequestQueue(Generic[Load]):
    """Requests that wait for an engine, lowest order first. Requests of each kind wait by themselves, so that a request
    without an eligible engine does not block requests of other kinds.

    ``engines``: those that get the requests. ``members``: the affinity of first requests of a sample to the engine of
    their group. ``turns``: of later requests of a sample to the engine of the request before.
    """

    def __init__(self, engines: EngineRanks[Load]) -> None:
        self.engines = engines
        self._kinds: dict[RequestKind, WaitingRequests] = {}
        self._tie = itertools.count()
        self._live = 0
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
            for kind, waiting in list(self._kinds.items()):
                waiting.remove_stale()
                if not waiting.entries:
                    del self._kinds[kind]
        of_kind = self._kinds.get(request.kind)
        if of_kind is None:
            of_kind = self._kinds[request.kind] = WaitingRequests(self.engines.ability)
        of_kind.push((request.order, next(self._tie), request))

    @property
    def _entries(self) -> int:
        return sum(waiting.entries for waiting in self._kinds.values())

    def assign(
        self, eligible: Callable[[Load, RequestKind], bool], start_groups: bool = True
    ) -> Iterator[tuple[Request, Load]]:
        """Yield (request, engine) for each assignment, until no eligible engine has a free slot. An assigned request is
        added to its engine. Nothing else may change meanwhile.

        Args:
            eligible: whether an engine may run requests of a kind; asked once for each ability and kind.
            start_groups: whether requests without a home are sent; those with a pinned version always are.
        """
        if not self._live:
            return
        for kind in [kind for kind, waiting in self._kinds.items() if not waiting.entries]:
            del self._kinds[kind]
        self._refresh()
        choice = EngineChoice(self.engines, self._kinds, eligible, start_groups)
        try:
            while self._live:
                engine = choice.engine()
                if engine is None:
                    return
                found = choice.request(engine, scarce=self._live > self.engines.free)
                if found is None:
                    choice.skip(engine)
                    continue
                target, first = choice.target(found, engine), found.prefix.home is None
                self._sent(found, target)
                self._refresh()
                choice.sent(found, target, first)
                yield found, target
        finally:
            choice.end()

    def _refresh(self) -> None:
        """Rank the engines that changed."""
        for engine in self.engines.refresh():
            for waiting in self._kinds.values():
                waiting.move(engine)

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
