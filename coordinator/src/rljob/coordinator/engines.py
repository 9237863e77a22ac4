"""Engines as the coordinator knows them: which weights each serves, and what it has in hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rljob.coordinator.connection import Connection
from rljob.protocol.messages import EngineCrashed, WeightAck
from rljob.scheduling.dispatch import EngineLoad

FAILURES_BEFORE_RESTART = 3


@dataclass(eq=False, kw_only=True)
class EngineRecord(EngineLoad):
    """One engine server: its load, as the scheduler sees it, and everything else. ``serving`` is the (lineage, version)
    whose digest and probe agreed with the trainer's; None: it gets no work."""

    pool: str
    connection: Connection | None  # of its agent
    pod: str = ""  # in a cluster
    evaluates: bool = False  # its pool does nothing but evaluation
    serving: tuple[int, int] | None = None
    update: int | None = None  # under way
    sent_digest: str | None = None
    ack: WeightAck | None = None
    failures: int = 0  # of updates, in a row
    fresh: bool = True  # the trainer opens a new weight group for it
    state: str = "ready"
    restarts: int = 0
    running: int = 0  # requests, by its agent's last heartbeat
    waiting: int = 0

    @property
    def name(self) -> str:
        """Name for people and the operator: of its pod in a cluster."""
        return self.pod or self.instance

    def begin_update(self, update: int) -> None:
        """An update of its weights was ordered."""
        self.update, self.sent_digest, self.ack = update, None, None

    def end_update(self) -> None:
        """The update under way came to an end, good or bad."""
        self.update, self.sent_digest, self.ack = None, None, None


@dataclass(eq=False)
class Engines:
    """All registered engines by instance."""

    by_instance: dict[str, EngineRecord] = field(default_factory=dict)
    crashed: dict[Connection, EngineCrashed] = field(default_factory=dict)  # last crash of each connected agent
    crashes: Counter[str] = field(default_factory=Counter)  # pool → crashes of engine servers since this start

    def connected(self) -> list[EngineRecord]:
        """Return engines whose agent is connected."""
        return [engine for engine in self.by_instance.values() if engine.connection is not None]

    def of_connection(self, connection: Connection) -> EngineRecord | None:
        """Return the engine behind a connection."""
        return next((engine for engine in self.by_instance.values() if engine.connection is connection), None)
