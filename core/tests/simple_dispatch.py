"""The policy of :class:`rljob.scheduling.dispatch.RequestQueue` without kept structures: each assignment looks at all
engines and all requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rljob.scheduling.engine_choice import FOREIGN, NEXT, OWN, TURN_EXCESS
from rljob.scheduling.request import EngineLoad, Request, RequestKind

Load = TypeVar("Load", bound=EngineLoad)
Able = Callable[[EngineLoad, RequestKind], bool]


class SimpleQueue:
    """A list of the requests that wait."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []

    def put(self, request: Request) -> None:
        """Add a request."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Remove a request if it waits."""
        if request in self.waiting:
            self.waiting.remove(request)

    def assign(
        self, engines: Sequence[Load], eligible: Callable[[Load, RequestKind], bool], start_groups: bool
    ) -> Iterator[tuple[Request, Load]]:
        """Yield (request, engine) for each assignment."""

        def able(engine: EngineLoad, kind: RequestKind) -> bool:
            found = next((each for each in engines if each is engine), None)
            return found is not None and eligible(found, kind)

        candidates = [engine for engine in engines if engine.free_slots > 0]
        while candidates and self.waiting:
            engine = min(candidates, key=lambda each: each.rank)
            free = sum(max(0, each.max_concurrency - len(each.requests)) for each in engines)
            request = self._next_for(engine, able, len(self.waiting) > free, start_groups)
            if request is None:
                candidates.remove(engine)
                continue
            target = _target(request, engine, engines, able)
            self.waiting.remove(request)
            target.add(request)
            request.prefix.home = target
            candidates = [each for each in candidates if each.free_slots > 0]
            yield request, target

    def _next_for(self, engine: EngineLoad, able: Able, scarce: bool, start_groups: bool) -> Request | None:
        found = []
        of_kinds = [request for request in self.waiting if able(engine, request.kind)]
        owned = {request.kind for request in of_kinds if request.home is engine}
        for request in of_kinds:
            home = request.home
            precedence = OWN if home is engine else FOREIGN if home is not None and able(home, request.kind) else NEXT
            starts = home is None and request.version is None
            held = precedence == FOREIGN and engine.busy
            if held or (starts and not start_groups) or (scarce and request.kind in owned and precedence != OWN):
                continue
            found.append((request.order[0], precedence if scarce else OWN, request.order, request))
        return min(found, key=lambda each: each[:3])[3] if found else None


def _target(request: Request, engine: Load, engines: Sequence[Load], able: Able) -> Load:
    home = next((each for each in engines if each is request.home), None)
    if home is None or not able(home, request.kind) or home.free_slots <= 0 or home.busy > engine.busy:
        return engine
    tokens = request.prefix_tokens if request.previous is None else TURN_EXCESS * request.tokens
    excess = home.tokens_per_slot - engine.tokens_per_slot
    return home if excess <= tokens / home.max_concurrency else engine
