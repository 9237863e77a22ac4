"""Draining of engines before removal: no new requests; running requests finish or move to other engines.

In a cluster the operator lists the pods in ``status.draining`` before it scales a pool down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from rljob.coordinator.engines import EngineRecord, Engines
from rljob.coordinator.trajectories import Trajectories

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 40.0
"""Time after the start of draining at which unfinished sequences move to another engine and continue from their prefix.
The operator removes the engine after 60 s in any case."""


class Draining:
    """The engines that are being drained.

    Args:
        engines: the registered engines.
        trajectories: the trajectories whose requests the engines run.
        on_change: called when an engine is no longer drained.
    """

    def __init__(self, engines: Engines, trajectories: Trajectories, on_change: Callable[[], None]) -> None:
        self._engines = engines
        self._trajectories = trajectories
        self._changed = on_change
        self._due: dict[str, asyncio.TimerHandle] = {}  # engine name → timer of PATIENCE_SECONDS

    def drain(self, names: Collection[str]) -> None:
        """Drain exactly the engines in ``names``, including those that connect later. An engine that is no longer in
        ``names`` accepts requests again."""
        for name in [name for name in self._due if name not in names]:
            self._due.pop(name).cancel()
            log.info("engine %s is no longer draining", name)
            self._changed()
        for name in names:
            if name not in self._due:
                log.info("engine %s is draining", name)
                self._due[name] = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._hand_back, name)
        for engine in self._engines.by_instance.values():
            drains = self.drains(engine)
            if engine.draining != drains:  # a change ranks the engine again
                engine.draining = drains

    def drains(self, engine: EngineRecord) -> bool:
        """Whether ``engine`` gets no new requests."""
        return bool(self._due) and engine.name in self._due

    def drained(self, engine: EngineRecord) -> bool:
        """Whether ``engine`` is being drained and has no requests left."""
        return self.drains(engine) and not self._trajectories.busy(engine)

    def _hand_back(self, name: str) -> None:
        """Interrupt the requests of an engine: it returns each with its tokens so far, and another engine continues."""
        for engine in self._engines.connected():
            if engine.name == name and engine.requests:
                log.info("interrupting %d requests of engine %s, which is draining", len(engine.requests), name)
                self._trajectories.interrupt(engine)
