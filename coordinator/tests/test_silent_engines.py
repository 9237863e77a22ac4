"""Which engines count as silent, without an event at the time at which they begin to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rljob.coordinator.engines import SILENT_SECONDS, EngineRecord, Engines
from rljob.coordinator.silent_engines import SilentEngines


class World:
    """An engine that is registered at time 0, when its agent was heard."""

    def __init__(self) -> None:
        self.connection: Any = SimpleNamespace(heard=0.0)
        self.engine = EngineRecord("a.0", 4, 64, pool="main", connection=self.connection, serving=(0, 0))
        self.engines = Engines()
        self.engines.register(self.engine)
        self.silent = SilentEngines(self.engines)
        self.silent.watch(self.engine, 0.0)

    def at(self, seconds: float) -> bool:
        """Return whether the engine gets no requests."""
        self.silent.update(seconds)
        self.engines.ranks.refresh()
        assert self.engine.silent == (self.engines.ranks.ability(self.engine) is None)
        return self.engine.silent


def test_an_engine_is_silent_as_long_as_its_agent_is_not_heard() -> None:
    world = World()
    assert [world.at(seconds) for seconds in (1, SILENT_SECONDS, SILENT_SECONDS + 1, 60)] == [False, False, True, True]
    world.connection.heard = 61.0
    assert not world.at(62)
    assert [world.at(61 + SILENT_SECONDS + more) for more in (0, 1)] == [False, True]


def test_an_engine_that_is_heard_is_looked_at_again_when_it_may_be_silent() -> None:
    world = World()
    world.connection.heard = 10.0
    assert not world.at(SILENT_SECONDS + 1)
    assert len(world.silent._due) == 1 and world.silent._due[0][0] == 10 + SILENT_SECONDS
    world.engine.connection = None
    world.silent.update(100.0)
    assert not world.engine.silent, "it is not connected"
    world.engine.connection = world.connection
    assert not world.at(100.0 + SILENT_SECONDS) and world.at(101.0 + SILENT_SECONDS)


def test_an_engine_that_was_removed_is_not_watched() -> None:
    world = World()
    world.engines.remove(world.engine)
    world.silent.update(100.0)
    assert not world.engine.silent and not world.silent._due
