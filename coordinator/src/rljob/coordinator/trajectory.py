"""The coordinator's record of one open sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord
from rljob.ledger.payload_record import INT32
from rljob.ledger.states import Kind
from rljob.protocol import messages as m
from rljob.protocol.contexts import GrowingDigest
from rljob.scheduling.dispatch import Request, RequestKey
from rljob.scheduling.groups import Sample

ANOTHER_CONTEXT = (
    "turn {} was generated from another context than it has now; a loop that runs again must make the same calls"
)


@dataclass(eq=False, slots=True)
class Turn:
    """A turn: what was added to the context, and the tokens written by the model so far. ``request``: None while no
    runner has requested it (again) since the coordinator started, and once the turn is finished."""

    given: bytes  # int32
    context_tokens: int  # of the whole context: all turns before, and ``given``
    request: m.GenerateRequest | None = None
    token_ids: bytes = b""
    finish: str = "abort"
    completions: int = 0  # number of recorded ones; an interrupted turn has several
    context: str = ""  # context_digest of the whole context; empty before the first completion

    @property
    def finished(self) -> bool:
        """Whether the model completed the turn."""
        return self.finish != "abort"

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that the model may still write."""
        assert self.request is not None
        return self.request.max_tokens - len(self.token_ids) // INT32

    def end(self, finish: str) -> None:
        """End the turn: it needs its request no more. ``finish``: stop | length."""
        self.finish, self.request = finish, None

    def result(self, sample: str, turn: int) -> m.GenerateResult:
        """Return the answer to the request of a finished turn."""
        return m.GenerateResult(sample, turn, self.token_ids, self.finish, self.context)

    def tokens(self, turn: int) -> m.TurnTokens:
        """Return the finished turn for another lease."""
        return m.TurnTokens(turn, self.given, self.token_ids, self.finish)


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
    turns: dict[int, Turn] = field(default_factory=dict)  # in order; all but the newest are finished
    tokens: int = 0  # of all turns: what they were given, and what the model wrote
    digest: GrowingDigest = field(default_factory=GrowingDigest)  # of these tokens
    kept_by: EngineRecord | None = None  # the engine whose agent keeps these tokens, without those of an open turn
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

    def turn_of(self, message: m.GenerateRequest) -> Turn:
        """Return the turn that a runner requests. All turns before it are finished.

        Raises:
            ValueError: it was requested with another context before, or it does not continue the turn before.
        """
        number, prefix = message.turn, (message.prefix_tokens, message.prefix)
        turn = self.turns.get(number)
        if turn is not None:
            before = self.sequence(number)
            same = turn.given == message.given and prefix == _prefix(len(before) // INT32, m.context_digest(before))
            if not same:
                raise ValueError(ANOTHER_CONTEXT.format(number))
        elif prefix != _prefix(self.tokens, self.digest.digest() if self.tokens else ""):
            raise ValueError(
                f"the context of turn {number} does not continue the turn before; a context is the context and the "
                "answer of the turn before, and an observation"
            )
        elif len(message.given) % INT32 or not (message.given or self.tokens):
            raise ValueError(f"the context of turn {number} is not the bytes of at least one int32 token id")
        else:
            turn = self.add_turn(number, message.given)
        return turn

    def add_turn(self, number: int, given: bytes) -> Turn:
        """Add and return a turn that the model has not begun."""
        self.append(given)
        turn = self.turns[number] = Turn(given, self.tokens)
        return turn

    def append(self, token_ids: bytes) -> None:
        """Append tokens to the sequence."""
        self.tokens += len(token_ids) // INT32
        self.digest.append(token_ids)

    def sequence(self, end: int | None = None) -> bytes:
        """Return all tokens (int32) of the turns before turn ``end``; None: of all turns."""
        parts: list[bytes] = []
        for turn in islice(self.turns.values(), end):
            parts += turn.given, turn.token_ids
        return b"".join(parts)

    def generate(self, request_id: m.RequestId, seed: int, engine: EngineRecord | None) -> m.Generate:
        """Return the message of a request to ``engine``, without the tokens that its agent keeps; to None, with all."""
        turn = self.turns[request_id.turn]
        assert turn.request is not None
        sampling = m.SamplingParams(
            temperature=turn.request.temperature,
            max_tokens=turn.remaining_tokens,
            stop_token_ids=turn.request.stop_token_ids,
            seed=seed,
            stop=turn.request.stop,
            min_tokens=turn.request.min_tokens,
            answered=len(turn.token_ids) // INT32,
        )
        if engine is None or engine is not self.kept_by:
            return m.Generate(request_id, self.sequence(), sampling)
        added = b"" if turn.completions else turn.given
        kept_tokens = self.tokens - len(added) // INT32
        return m.Generate(request_id, added, sampling, kept_tokens, self.digest.digest())

    def discard(self, attempts: int) -> None:
        """Discard all turns; ``attempts``: the first attempt that counts from now on."""
        self.attempts, self.tokens, self.digest = attempts, 0, GrowingDigest()
        self.turns.clear()
        self.dispatched = self.recorded_version = self.sample.min_version = None
        self.kept(None)

    def sent_to(self, engine: EngineRecord) -> None:
        """Record that an engine gets a request: no agent keeps the tokens until it has completed the request."""
        self.kept(engine)
        self.kept_by = None

    def kept(self, engine: EngineRecord | None) -> None:
        """Record which engine's agent keeps the tokens; another one drops them."""
        if self.kept_by is not None and self.kept_by is not engine:
            self.kept_by.forget_context(self.sample.id)
        self.kept_by = engine

    def wants(self, number: int) -> bool:
        """Return whether turn ``number`` is not finished."""
        turn = self.turns.get(number)
        return turn is None or not turn.finished


def _prefix(tokens: int, digest: str) -> tuple[int, str]:
    """Return length and digest of a prefix as a request has them: the first turn has none."""
    return (tokens, digest if tokens else "")
