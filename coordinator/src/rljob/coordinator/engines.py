"""The coordinator's records of engines: the weights that each serves, and its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from rljob.coordinator.connection import Connection
from rljob.protocol.agent_protocol import HEARTBEAT_SECONDS, EngineCrashed, Forget, WeightAck
from rljob.scheduling.engine_ranks import EngineRanks
from rljob.scheduling.request import EngineLoad

FAILURES_BEFORE_RESTART = 3
SILENT_HEARTBEATS = 3
SILENT_SECONDS = SILENT_HEARTBEATS * HEARTBEAT_SECONDS
FORGOTTEN_TOGETHER = 64  # contexts that an agent drops by one message
WATCHED = frozenset({"connection", "serving", "update", "ack", "state", "draining", "silent"})
"""Fields of an engine whose changes its watchers note, besides those of its requests."""


@dataclass(eq=False, kw_only=True)
class EngineRecord(EngineLoad):
    """One engine server: its load for the scheduler, its connection and its weight update. ``serving``: the (lineage,
    version) whose digest and probe agreed with the trainer's; None: the engine gets no requests."""

    pool: str
    connection: Connection | None  # of its agent
    pod: str = ""  # in a cluster
    evaluates: bool = False  # its pool runs evaluation only
    serving: tuple[int, int] | None = None
    update: int | None = None  # the running weight update
    sent_digest: str | None = None
    ack: WeightAck | None = None
    failures: int = 0  # consecutive failed updates
    fresh: bool = True  # the trainer must open a new weight group for it
    tensors: str = ""  # digest of the list of parameters that its connection has had
    state: str = "ready"
    draining: bool = False  # see rljob.coordinator.draining
    silent: bool = False  # see rljob.coordinator.silent_engines
    restarts: int = 0
    running: int = 0  # requests, from its agent's last heartbeat
    waiting: int = 0
    forgotten: list[str] = field(default_factory=list)  # samples whose context its agent need not keep

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in WATCHED:
            self.touch()

    @property
    def present(self) -> bool:
        """Whether its agent is connected."""
        return self.connection is not None

    @property
    def ability(self) -> Hashable:
        """Its weights, its purpose and the longest sequence that it supports; None: it gets no requests."""
        if self.serving is None or self.state == "leaving" or self.draining or self.silent:
            return None
        return (self.serving, self.evaluates, self.max_model_length)

    def silent_seconds(self, now: float) -> float:
        """Return for how long the agent has been silent, if it has missed SILENT_HEARTBEATS; else 0. ``now``: time of
        the event loop. The engine gets no requests; its connection is closed if it answers no ping either."""
        silent = now - self.connection.heard if self.connection is not None else 0.0
        return silent if silent > SILENT_SECONDS else 0.0

    @property
    def name(self) -> str:
        """Name for users and the operator: the pod name in a cluster."""
        return self.pod or self.instance

    def forget_context(self, sample: str) -> None:
        """Have the agent drop the context of a sample, together with those of other samples."""
        self.forgotten.append(sample)
        if len(self.forgotten) >= FORGOTTEN_TOGETHER:
            forgotten, self.forgotten = self.forgotten, []
            if self.connection is not None:
                self.connection.send(Forget(forgotten))

    def begin_update(self, update: int) -> None:
        """Start a weight update."""
        self.update, self.sent_digest, self.ack = update, None, None

    def end_update(self) -> None:
        """End the running weight update, successful or not."""
        self.update, self.sent_digest, self.ack = None, None, None


@dataclass(eq=False)
class Engines:
    """All registered engines, and crashes of engine servers. ``ranks``: the order in which they get requests."""

    by_instance: dict[str, EngineRecord] = field(default_factory=dict)
    ranks: EngineRanks[EngineRecord] = field(default_factory=EngineRanks)
    crashed: dict[Connection, EngineCrashed] = field(default_factory=dict)  # last crash of each connected agent
    crashes: Counter[str] = field(default_factory=Counter)  # pool → crashes of engine servers since this start

    with_requests: dict[EngineRecord, None] = field(default_factory=dict)  # as of the last take_changed
    in_update: dict[EngineRecord, None] = field(default_factory=dict)
    _changed: dict[EngineRecord, None] = field(default_factory=dict)

    def register(self, engine: EngineRecord) -> None:
        """Add an engine of a new instance."""
        self.by_instance[engine.instance] = engine
        self.ranks.add(engine)
        engine.watch(self._changed)

    def remove(self, engine: EngineRecord) -> None:
        """Remove a registered engine."""
        del self.by_instance[engine.instance]
        self.ranks.remove(engine)
        engine.unwatch(self._changed)

    def take_changed(self) -> list[EngineRecord]:
        """Return the engines that changed since the last call, in the order of their first change."""
        changed = list(self._changed)
        self._changed.clear()
        for engine in changed:
            registered = self.by_instance.get(engine.instance) is engine
            for group, belongs in ((self.with_requests, engine.requests), (self.in_update, engine.update is not None)):
                if registered and belongs:
                    group[engine] = None
                else:
                    group.pop(engine, None)
        return changed

    def connected(self) -> list[EngineRecord]:
        """Return the engines whose agent is connected."""
        return [engine for engine in self.by_instance.values() if engine.connection is not None]

    def of_connection(self, connection: Connection) -> EngineRecord | None:
        """Return the engine of a connection; None before registration."""
        engine = self.by_instance.get(connection.instance)
        return engine if engine is not None and engine.connection is connection else None
