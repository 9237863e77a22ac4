"""Notes which engines are silent: their agent is connected, and has missed SILENT_HEARTBEATS.

Silence begins without an event. Each engine has a time at which it is looked at: when it would have been silent long
enough if its last message then had been the last one.
"""

from __future__ import annotations

import heapq
import itertools

from rljob.coordinator.engines import SILENT_SECONDS, EngineRecord, Engines


class SilentEngines:
    """Sets ``silent`` of the registered engines."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._due: list[tuple[float, int, EngineRecord]] = []
        self._number = itertools.count()
        self._silent: dict[EngineRecord, None] = {}

    def watch(self, engine: EngineRecord, now: float) -> None:
        """Watch an engine until it is removed; ``now``: time of the event loop."""
        heapq.heappush(self._due, (now + SILENT_SECONDS, next(self._number), engine))

    def update(self, now: float) -> None:
        """Note which engines are silent; ``now``: time of the event loop."""
        heard = [engine for engine in self._silent if not engine.silent_seconds(now)]
        for engine in heard:
            del self._silent[engine]
            engine.silent = False
        while self._due and self._due[0][0] < now:
            engine = heapq.heappop(self._due)[2]
            if self._engines.by_instance.get(engine.instance) is not engine:
                continue
            if engine.silent_seconds(now):
                self._silent[engine] = None
                engine.silent = True
            else:
                heard.append(engine)
        for engine in heard:
            self.watch(engine, now if engine.connection is None else min(now, engine.connection.heard))
