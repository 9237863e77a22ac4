"""One open sample, as the coordinator holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord
from rljob.ledger.payload_record import INT32
from rljob.ledger.states import Kind
from rljob.protocol import messages as m
from rljob.scheduling.dispatch import Request, RequestKey
from rljob.scheduling.groups import Sample


@dataclass(eq=False)
class Turn:
    """A turn's context and what the model has written of it so far."""

    need: m.GenerateRequest
    token_ids: bytes = b""
    finish: str = "abort"
    completions: int = 0  # recorded; an interrupted turn has several

    @property
    def finished(self) -> bool:
        """Whether the model ended it."""
        return self.finish != "abort"

    @property
    def room(self) -> int:
        """Tokens the model may still write."""
        return self.need.max_tokens - len(self.token_ids) // INT32

    def tokens(self, turn: int) -> m.TurnTokens:
        """Return it as a message."""
        return m.TurnTokens(turn, self.need.prompt, self.token_ids, self.finish)


@dataclass(eq=False)
class Trajectory:
    """A sample that has no reward yet. ``version`` pins evaluation to one policy version. ``attempts`` counts fresh
    starts that were thrown away."""

    sample: Sample
    task: str
    row: int
    version: int | None = None
    attempts: int = 0
    runner: Connection | None = None
    turns: dict[int, Turn] = field(default_factory=dict)
    request: Request | None = None
    returns: int = 0  # how often an engine gave its request back undone
    recorded_version: int | None = None  # lowest version of a recorded token
    dispatched: int | None = None  # version of the engine that has the request
    early: dict[RequestKey, tuple[m.Completion, Connection]] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """What the sample is for."""
        return Kind.TRAIN if self.version is None else Kind.EVALUATION

    @property
    def order(self) -> tuple[int, int, int]:
        """Place in the queue: evaluation first, then by admission."""
        return (0 if self.version is not None else 1, self.sample.group.seq, self.sample.member)

    @property
    def engine(self) -> EngineRecord | None:
        """The engine that has the request."""
        engine = None if self.request is None else self.request.engine
        assert engine is None or isinstance(engine, EngineRecord)
        return engine

    def check_turns(self, turns: int) -> None:
        """Check that the loop used ``turns`` turns: all turns that exist, and all of them finished.

        Raises:
            ValueError: it did not.
        """
        if turns != len(self.turns):
            raise ValueError(
                f"its loop made {turns} turns now and {len(self.turns)} before; a loop that runs again must make the "
                "same calls"
            )
        for number, turn in self.turns.items():
            if not turn.finished:
                raise ValueError(f"it has a reward, but turn {number} is not finished")

    def wants(self, number: int) -> bool:
        """Return whether the model has not ended turn ``number`` yet."""
        turn = self.turns.get(number)
        return turn is None or not turn.finished
