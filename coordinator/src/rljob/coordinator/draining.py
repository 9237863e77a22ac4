"""Engines that will be removed: they get no new requests, and those they have finish or go to other engines.

In a cluster the operator names their pods in ``status.draining`` before it lowers a pool's replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from rljob.coordinator.engines import EngineRecord, Engines
from rljob.coordinator.trajectories import Trajectories

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 40.0
"""Sequences that have not ended this long after draining began continue on another engine from their prefix. The
operator removes the engine after 60 s in any case."""


class Draining:
    """Which engines are drained.

    Args:
        engines: those that are connected.
        trajectories: whose requests they have.
        on_change: called when an engine may get, or lose, work.
    """

    def __init__(self, engines: Engines, trajectories: Trajectories, on_change: Callable[[], None]) -> None:
        self._engines = engines
        self._trajectories = trajectories
        self._changed = on_change
        self._due: dict[str, asyncio.TimerHandle] = {}  # name → when its patience ends

    def drain(self, names: Collection[str]) -> None:
        """Drain exactly the engines called ``names``, now and when they connect: an engine that is not named
        any more gets work again."""
        for name in self._due.keys() - set(names):
            self._due.pop(name).cancel()
            log.info("engine %s is not drained any more", name)
            self._changed()
        for name in names:
            if name not in self._due:
                log.info("engine %s is drained", name)
                self._due[name] = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._hand_back, name)

    def drains(self, engine: EngineRecord) -> bool:
        """Whether ``engine`` gets nothing new."""
        return engine.name in self._due

    def drained(self, engine: EngineRecord) -> bool:
        """Whether ``engine`` was to be drained and has nothing in hand any more."""
        return self.drains(engine) and not engine.requests and not self._trajectories.claimed(engine)

    def _hand_back(self, name: str) -> None:
        """Take back an engine's requests: each sequence comes back with its tokens so far and continues on another."""
        for engine in self._engines.connected():
            if engine.name == name and engine.requests:
                log.info("engine %s hands back %d sequences", name, len(engine.requests))
                self._trajectories.interrupt(engine)
