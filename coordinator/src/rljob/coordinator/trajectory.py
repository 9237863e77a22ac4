"""The coordinator's record of one open sample."""

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
    """A turn: its context, and the tokens written by the model so far."""

    request: m.GenerateRequest
    token_ids: bytes = b""
    finish: str = "abort"
    completions: int = 0  # number of recorded ones; an interrupted turn has several

    @property
    def finished(self) -> bool:
        """Whether the model completed the turn."""
        return self.finish != "abort"

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that the model may still write."""
        return self.request.max_tokens - len(self.token_ids) // INT32

    def tokens(self, turn: int) -> m.TurnTokens:
        """Return the turn as a message."""
        return m.TurnTokens(turn, self.request.prompt, self.token_ids, self.finish)


@dataclass(eq=False)
class Trajectory:
    """A sample without a reward. ``version``: the pinned policy version of an evaluation. ``attempts``: the first
    attempt that counts; earlier attempts were discarded."""

    sample: Sample
    task: str
    row: int
    version: int | None = None
    attempts: int = 0
    runner: Connection | None = None
    lease: int = 0  # number of the newest lease; 0: none yet, or none since the coordinator started
    turns: dict[int, Turn] = field(default_factory=dict)
    request: Request | None = None
    previous: EngineRecord | None = None  # the engine that got its last request
    returns: int = 0  # how often engines failed to run its requests
    recorded_version: int | None = None  # lowest version of a recorded token
    dispatched: int | None = None  # version of the engine that holds the request
    since: float = 0.0  # time of the event loop at which it got its runner, its request, its engine or its answer
    early: dict[RequestKey, tuple[m.Completion, Connection]] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Purpose of the sample."""
        return Kind.TRAIN if self.version is None else Kind.EVALUATION

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of its requests: evaluation first, then order of admission."""
        return (0 if self.version is not None else 1, self.sample.group.seq, self.sample.member)

    @property
    def engine(self) -> EngineRecord | None:
        """The engine that holds the request; None if no engine does."""
        engine = None if self.request is None else self.request.engine
        assert engine is None or isinstance(engine, EngineRecord)
        return engine

    def check_turns(self, turns: int) -> None:
        """Check that the loop used ``turns`` turns: all recorded turns, and all of them finished.

        Raises:
            ValueError: the number of turns differs, or a turn is not finished.
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
        """Return whether turn ``number`` is not finished."""
        turn = self.turns.get(number)
        return turn is None or not turn.finished
