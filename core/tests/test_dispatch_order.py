"""The order of assignments is that of a queue that looks at all engines and requests, and its cost does not grow with
the number of engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.tests.simple_dispatch import SimpleQueue
from rljob.scheduling.dispatch import RequestQueue
from rljob.scheduling.engine_ranks import EngineRanks
from rljob.scheduling.request import EngineLoad, Request, RequestKind, SharedPrefix


@dataclass(eq=False)
class Engine(EngineLoad):
    """An engine of a test. ``serves``: version of its weights; None: it gets no requests."""

    serves: int | None = 0
    connected: bool = True

    @property
    def present(self) -> bool:
        """Whether it is connected."""
        return self.connected

    @property
    def ability(self) -> Hashable:
        """What decides its kinds of requests."""
        return None if self.serves is None else (self.serves, self.max_model_length)


class World:
    """Engines and requests, with one of the two queues."""

    def __init__(self, sizes: list[int], simple: bool) -> None:
        self.engines = [Engine(f"e{n}", size, 64 if n % 4 else 32) for n, size in enumerate(sizes)]
        self.prefixes = [SharedPrefix() for _ in range(6)]
        self.requests: dict[str, Request] = {}
        self.simple = SimpleQueue() if simple else None
        ranks = EngineRanks[Engine]()
        self.queue = RequestQueue(ranks)
        for engine in self.engines:
            ranks.add(engine)
        self.version = 0

    def put(self, request: Request) -> None:
        self.requests[request.key[0]] = request
        (self.simple or self.queue).put(request)

    def new(self, name: str, group: int, order: tuple[int, int, int], draw: tuple[int, int, int, bool]) -> None:
        """Put a first request; a request with a pinned version is of a group of its own."""
        tokens, length, prefix_tokens, pinned = draw
        prefix = SharedPrefix() if pinned else self.prefixes[group]
        version = self.version if pinned else None
        self.put(Request((name, 0, 0, ""), prefix, order, tokens, version, length, None, prefix_tokens))

    def end(self, name: str, next_turn: bool) -> None:
        """End a request that an engine has, and put the next turn of its sample."""
        request = self.requests.pop(name)
        engine = request.engine
        assert engine is not None
        engine.remove(request.key)
        if next_turn:
            key = (name, request.key[1] + 1, 0, "")
            self.put(Request(key, request.prefix, request.order, request.tokens + 5, request.version,
                             request.min_model_length, engine, request.tokens))  # fmt: skip

    def cancel(self, name: str) -> None:
        (self.simple or self.queue).cancel(self.requests.pop(name))

    def change(self, number: int, serves: int | None, connected: bool) -> None:
        engine = self.engines[number]
        engine.serves, engine.connected = serves, connected
        engine.touch()

    def eligible(self, engine: Engine, kind: RequestKind) -> bool:
        pinned, length = kind
        return engine.serves == (self.version if pinned is None else pinned) and engine.max_model_length >= length

    def assign(self, start_groups: bool) -> list[tuple[str, str]]:
        if self.simple is None:
            found = list(self.queue.assign(self.eligible, start_groups))
        else:
            present = [engine for engine in self.engines if engine.present]
            able = [engine for engine in present if engine.serves is not None]
            found = list(
                self.simple.assign(present, lambda e, kind: e in able and self.eligible(e, kind), start_groups)
            )
        return [(request.key[0], engine.instance) for request, engine in found]


@example(sizes=[3, 2, 2, 4, 5, 6, 3], seed=41, busy=0.8, faults=0.05)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(0, 2**32), st.sampled_from([0.1, 0.4, 0.8]),
    st.sampled_from([0.0, 0.05, 0.2]),
)  # fmt: skip
def test_assignments_are_those_of_a_queue_without_kept_structures(
    sizes: list[int], seed: int, busy: float, faults: float
) -> None:
    """Groups of several lengths, next turns, evaluations, engines that are lost and that get other weights. In the
    example requests of a group move to an engine that does not support their length."""
    draw = random.Random(seed)
    worlds = [World(sizes, simple=False), World(sizes, simple=True)]
    for number in range(60):
        for _ in range(draw.randrange(1 + int(12 * busy))):
            name, group = f"s{number}.{len(worlds[0].requests)}", draw.randrange(6)
            order = (draw.choice([0, 1, 1, 1]), draw.randrange(50), number * 1000 + len(worlds[0].requests))
            of_group = (draw.choice([8, 30, 60]), draw.choice([0, 0, 64]), draw.choice([0, 8, 30]), order[0] == 0)
            for world in worlds:
                world.new(name, group, order, of_group)
        if draw.random() < faults:
            change = (draw.randrange(len(sizes)), draw.choice([None, 0, 1, 1]), draw.random() < 0.8)
            version = draw.choice([0, 1])
            for world in worlds:
                world.change(*change)
                world.version = version
        start_groups = draw.random() < 0.7
        found = [world.assign(start_groups) for world in worlds]
        assert found[0] == found[1]
        for name in list(worlds[0].requests):
            running = worlds[0].requests[name].engine is not None
            if draw.random() < (0.3 if running else 0.03):
                next_turn = draw.random() < 0.5
                for world in worlds:
                    world.end(name, next_turn) if running else world.cancel(name)
        assert len(worlds[0].queue) == len(worlds[1].simple.waiting)  # type: ignore[union-attr]


def test_the_work_of_an_assignment_does_not_grow_with_the_number_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with and without a home, among idle engines, engines that run all that they can, and full ones."""
    ranked, asked = list[str](), list[str]()
    get: Callable[[EngineLoad], tuple[bool, float, str]] = vars(EngineLoad)["rank"].fget

    def counted(engine: EngineLoad) -> tuple[bool, float, str]:
        ranked.append(engine.instance)
        return get(engine)

    def eligible(engine: Engine, kind: RequestKind) -> bool:
        asked.append(engine.instance)
        return True

    monkeypatch.setattr(EngineLoad, "rank", property(counted))
    for held in (0, 4, 8):
        world = World([4] * 500, simple=False)
        for engine in world.engines:
            for number in range(held):
                engine.add(Request((engine.instance, number, 0, ""), SharedPrefix(), (1, 0, number), 8))
        list(world.queue.assign(eligible))
        world.put(Request(("first", 0, 0, ""), SharedPrefix(), (1, 1, 0), 8))
        world.queue.engines.refresh()
        ranked.clear()
        for number, home in enumerate(world.engines[100:150]):
            if held == 8:
                home.remove((home.instance, 0, 0, ""))
            world.put(Request((f"s{number}", 1, 0, ""), SharedPrefix(), (1, 0, number), 8, previous=home))
            asked.clear()
            assert list(world.queue.assign(eligible))
            assert len(asked) <= 2 * 2, "once for each ability and kind"
        assert len(ranked) <= 3 * 50
