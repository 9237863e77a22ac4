"""Engines as the coordinator knows them: who serves which weights, and what each has in hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob.coordinator.peers import Peer
from rljob.protocol.messages import WeightAck
from rljob.scheduling.dispatch import EngineLoad

FAILURES_BEFORE_RESTART = 3


@dataclass(eq=False)
class Engine:
    """One engine server. ``serving`` is the (lineage, version) whose digest and probe agreed with the trainer's; None:
    it gets no work."""

    instance: str
    pool: str
    peer: Peer | None
    load: EngineLoad
    serving: tuple[int, int] | None = None
    update: int | None = None  # under way
    sent_digest: str | None = None
    ack: WeightAck | None = None
    failures: int = 0  # of updates, in a row
    fresh: bool = True  # the trainer shall open a new weight group
    state: str = "ready"
    restarts: int = 0

    def begin_update(self, update: int) -> None:
        """An update of its weights was ordered."""
        self.update, self.sent_digest, self.ack = update, None, None

    def end_update(self) -> None:
        """The update under way came to an end, good or bad."""
        self.update, self.sent_digest, self.ack = None, None, None


@dataclass(eq=False)
class Engines:
    """All connected engines by instance."""

    by_instance: dict[str, Engine] = field(default_factory=dict)

    def connected(self) -> list[Engine]:
        """Return engines whose agent is there."""
        return [engine for engine in self.by_instance.values() if engine.peer is not None]

    def of_peer(self, peer: Peer) -> Engine | None:
        """Return the engine behind a connection."""
        return next((engine for engine in self.by_instance.values() if engine.peer is peer), None)
