"""The coordinator's record of one open sample."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord
from rljob.ledger.payload_record import INT32
from rljob.ledger.states import Kind
from rljob.protocol import branches
from rljob.protocol.agent_protocol import Completion, Generate, RequestId, SamplingParams
from rljob.protocol.branches import TurnKey
from rljob.protocol.contexts import GrowingDigest, context_digest
from rljob.protocol.runner_protocol import GenerateRequest, GenerateResult, PoolAnswer, PoolAnswered, TurnTokens
from rljob.scheduling.groups import Sample
from rljob.scheduling.request import Request, RequestKey

ANOTHER_CONTEXT = (
    "{} was generated from another context than it has now; a loop that runs again must make the same calls"
)


MAX_RUNNER_ENDS = 3
"""Processes of runners that code of a sample may end; then the sample fails."""
MOST_EQUAL_QUESTIONS = 1 << 20
AnswerKey: TypeAlias = tuple[str, str, int]
"""Branch, question and number of a PoolAnswer."""


class Turn(msgspec.Struct, eq=False):
    """A turn: what was added to the context, and the tokens written by the model so far. ``request``: None while no
    runner has requested it (again) since the coordinator started, and once the turn is finished."""

    given: bytes  # int32
    context_tokens: int  # of the whole context: all turns before, and ``given``
    request: GenerateRequest | None = None
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

    def result(self, sample: str, turn: int, branch: str) -> GenerateResult:
        """Return the answer to the request of a finished turn."""
        return GenerateResult(sample, turn, self.token_ids, self.finish, self.context, branch)

    def tokens(self, turn: int, branch: str) -> TurnTokens:
        """Return the finished turn for another lease."""
        return TurnTokens(turn, self.given, self.token_ids, self.finish, branch)


class Branch(msgspec.Struct, eq=False):
    """The tokens of a branch, and the request of its open turn. Branches of a trajectory are generated at the same
    time, each one turn after the other."""

    name: str
    tokens: int = 0  # of all turns of it and before it: what they were given, and what the model wrote
    digest: GrowingDigest = msgspec.field(default_factory=GrowingDigest)  # of these tokens
    kept_by: EngineRecord | None = None  # the engine whose agent keeps these tokens, without those of an open turn
    request: Request | None = None
    previous: EngineRecord | None = None  # the engine that got its last request
    dispatched: int | None = None  # version of the engine that holds the request
    returns: int = 0  # how often in a row engines failed to run its request

    @property
    def engine(self) -> EngineRecord | None:
        """The engine that holds the request; None if no engine does."""
        request = self.request
        return None if request is None else request.engine  # type: ignore[return-value]  # the coordinator's engines

    def append(self, token_ids: bytes) -> None:
        """Append tokens."""
        self.tokens += len(token_ids) // INT32
        self.digest.append(token_ids)

    def sent_to(self, sample: str, engine: EngineRecord) -> None:
        """Record that an engine gets a request: no agent keeps the tokens until it has completed the request."""
        self.kept(sample, engine)
        self.kept_by = None

    def kept(self, sample: str, engine: EngineRecord | None) -> None:
        """Record which engine's agent keeps the tokens; another one drops them."""
        if self.kept_by is not None and self.kept_by is not engine:
            self.kept_by.forget_context(branches.context_name(sample, self.name))
        self.kept_by = engine


class Trajectory(msgspec.Struct, eq=False):
    """A sample without a reward. ``version``: the pinned policy version of an evaluation. ``attempts``: the first
    attempt that counts; earlier attempts were discarded. ``kind``: purpose of the sample, and ``order``: sort key of
    its requests, evaluation first, then order of admission; both are derived."""

    sample: Sample
    task: str
    row: int
    version: int | None = None
    attempts: int = 0
    runner: Connection | None = None
    lease: int = 0  # number of the newest lease; 0: none yet, or none since the coordinator started
    turns: dict[TurnKey, Turn] = {}  # after those that they continue
    branches: dict[str, Branch] = {}  # with a turn
    answers: dict[AnswerKey, PoolAnswer] = {}  # of frozen pools
    runner_ends: set[int] = set()  # leases under which its code ended a runner, since the coordinator started
    recorded_version: int | None = None  # lowest version of a recorded token
    dispatched_before: int | None = None  # that of the ledger when the coordinator started; None after a completion
    since: float = 0.0  # time of the event loop at which it got its runner, its request, its engine or its answer
    early: dict[RequestKey, tuple[Completion, Connection]] = {}
    kind: Kind = Kind.TRAIN
    order: tuple[int, int, int] = (1, 0, 0)

    def __post_init__(self) -> None:
        trains = self.version is None
        self.kind = Kind.TRAIN if trains else Kind.EVALUATION
        self.order = (1 if trains else 0, self.sample.group.seq, self.sample.member)

    @property
    def requests(self) -> list[Request]:
        """The requests of the open turns."""
        return [branch.request for branch in self.branches.values() if branch.request is not None]

    @property
    def engine(self) -> EngineRecord | None:
        """An engine that holds a request; None if no engine does."""
        return next((branch.engine for branch in self.branches.values() if branch.engine is not None), None)

    @property
    def generated(self) -> bool:
        """Whether an engine got a request, or a frozen pool answered a question."""
        held = any(branch.dispatched is not None for branch in self.branches.values())
        return bool(self.turns or self.answers) or held or self.dispatched_before is not None

    def bound_version(self) -> None:
        """Set the sample's lowest version: no token of it, recorded or being generated, is of a lower one."""
        lowest, before = self.recorded_version, self.dispatched_before
        if before is not None and (lowest is None or before < lowest):
            lowest = before
        for branch in self.branches.values():
            version = branch.dispatched
            if version is not None and (lowest is None or version < lowest):
                lowest = version
        self.sample.min_version = lowest

    def branch_of(self, request: Request) -> Branch | None:
        """Return the branch whose open turn has a request; None if the request is no longer current."""
        branch = self.branches.get(request.key[3])
        return branch if branch is not None and branch.request is request else None

    @property
    def written(self) -> int:
        """Number of tokens that the model has written."""
        return sum(len(turn.token_ids) for turn in self.turns.values()) // INT32

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
        for key, turn in self.turns.items():
            if not turn.finished:
                raise ValueError(f"it has a reward, but {branches.described(*key)} is not finished")

    def turn_of(self, message: GenerateRequest) -> Turn:
        """Return the turn that a runner requests.

        Raises:
            ValueError: its branch has another open turn, or the turn that it continues is not finished; it was
                requested with another context before, or it does not continue that turn.
        """
        key, prefix = (message.turn, message.branch), (message.prefix_tokens, message.prefix)
        branches.check_turn(*key)
        earlier, branch = branches.before(key), self.branches.get(message.branch)
        open_ = branch is not None and branch.request is not None and branch.request.key[1] != message.turn
        if open_ or (earlier is not None and self.wants(earlier)):
            raise ValueError(
                f"it requests {branches.described(*key)} before another turn is finished; a loop awaits each turn "
                "before it requests the next one"
            )
        turn = self.turns.get(key)
        if turn is not None:
            before = self.sequence(earlier)
            same = turn.given == message.given and prefix == _prefix(len(before) // INT32, context_digest(before))
            if not same:
                raise ValueError(ANOTHER_CONTEXT.format(branches.described(*key)))
            return turn
        branch = branch or self._fork(message.branch, earlier)
        if prefix != _prefix(branch.tokens, branch.digest.digest() if branch.tokens else ""):
            raise ValueError(
                f"the context of {branches.described(*key)} does not continue the turn before; a context is the "
                "context and the answer of the turn before, and an observation"
            )
        if len(message.given) % INT32 or not (message.given or branch.tokens):
            named = branches.described(*key)
            raise ValueError(f"the context of {named} is not the bytes of at least one int32 token id")
        return self.add_turn(key, message.given, branch)

    def record_runner_end(self, lease: int) -> bool:
        """Record that its code ended a process of a runner under ``lease``; return whether there were MAX_RUNNER_ENDS.
        The next process of the runner repeats its report when it connects again."""
        self.runner_ends.add(lease)
        return len(self.runner_ends) >= MAX_RUNNER_ENDS

    def answer_of(self, message: PoolAnswered) -> tuple[PoolAnswer, bool]:
        """Return the answer of a frozen pool that counts, and whether it is new.

        Raises:
            ValueError: the answer is malformed.
        """
        answer = message.answer
        branches.check_turn(answer.turn, answer.branch)
        if answer.finish not in ("stop", "length") or not 0 <= answer.number < MOST_EQUAL_QUESTIONS:
            raise ValueError(
                f"the answer of pool {answer.pool} has finish {answer.finish!r} and number {answer.number}"
            )
        key = (answer.branch, answer.question, answer.number)
        new = key not in self.answers
        return self.answers.setdefault(key, answer), new

    def add_turn(self, key: TurnKey, given: bytes, branch: Branch | None = None) -> Turn:
        """Add and return a turn that the model has not begun. ``branch``: that of the turn, if it is not here yet."""
        branch = branch or self.branches.get(key[1]) or self._fork(key[1], branches.before(key))
        self.branches[branch.name] = branch
        branch.append(given)
        turn = self.turns[key] = Turn(given, branch.tokens)
        return turn

    def _fork(self, name: str, earlier: TurnKey | None) -> Branch:
        """Return a new branch with the tokens up to turn ``earlier``."""
        branch = Branch(name)
        if earlier is not None:
            parent = self.branches[earlier[1]]
            branch.append(self.sequence(earlier))
            branch.previous, branch.kept_by = parent.previous, parent.kept_by
        return branch

    def sequence(self, last: TurnKey | None) -> bytes:
        """Return all tokens (int32) of a turn and of those that it continues; None: no tokens."""
        parts: list[bytes] = []
        for key in branches.path(last) if last is not None else []:
            parts += self.turns[key].given, self.turns[key].token_ids
        return b"".join(parts)

    def generate(self, request_id: RequestId, seed: int, engine: EngineRecord | None) -> Generate:
        """Return the message of a request to ``engine``, without the tokens that its agent keeps; to None, with all."""
        key, branch = (request_id.turn, request_id.branch), self.branches[request_id.branch]
        turn = self.turns[key]
        assert turn.request is not None
        sampling = SamplingParams(
            temperature=0.0 if self.sample.greedy else turn.request.temperature,
            max_tokens=turn.remaining_tokens,
            stop_token_ids=turn.request.stop_token_ids,
            seed=seed,
            stop=turn.request.stop,
            min_tokens=turn.request.min_tokens,
            answered=len(turn.token_ids) // INT32,
        )
        if engine is None or engine is not branch.kept_by:
            return Generate(request_id, self.sequence(key), sampling)
        added = b"" if turn.completions else turn.given
        kept_tokens = branch.tokens - len(added) // INT32
        return Generate(request_id, added, sampling, kept_tokens, branch.digest.digest())

    def discard(self, attempts: int) -> None:
        """Discard all turns and answers; ``attempts``: the first attempt that counts from now on."""
        self.forget_contexts()
        self.answers.clear()
        self.attempts, self.dispatched_before, self.recorded_version = attempts, None, None
        self.turns.clear()
        self.branches.clear()
        self.bound_version()

    def forget_contexts(self) -> None:
        """Have the agents drop the tokens of all branches."""
        for branch in self.branches.values():
            branch.kept(self.sample.id, None)

    def wants(self, key: TurnKey) -> bool:
        """Return whether a turn is not finished."""
        turn = self.turns.get(key)
        return turn is None or not turn.finished


def _prefix(tokens: int, digest: str) -> tuple[int, str]:
    """Return length and digest of a prefix as a request has them: the first turn has none."""
    return (tokens, digest if tokens else "")
