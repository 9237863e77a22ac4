"""Messages between runners and the coordinator. rljob.protocol.shared_messages has what all messages have in common."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rljob.protocol.shared_messages import Message, Reject

# --- runner -> coordinator --------------------------------------------------------------------------------------------


class RunnerEnd(msgspec.Struct, array_like=True):
    """How code of a sample ended a process of a runner, or blocked it until it was killed. ``how``: a part of a
    sentence about the sample's loop."""

    sample: str
    lease: int  # of the LeaseTrajectory
    how: str


class RegisterRunner(Message):
    """First message of a runner's connection. ``driving`` are its trajectories: sample → lease. ``held_out`` are the
    sizes of the tasks' held-out splits in rows; a task not named has endless ones. After the last row of a split its
    first row follows. ``before``: how the process before this one ended, if code of a sample ended it."""

    instance: str
    capacity: int  # trajectories of training that it takes at a time, and as many of evaluations
    driving: dict[str, int]
    held_out: dict[str, int] = {}
    before: RunnerEnd | None = None


class GenerateRequest(Message):
    """A turn wants tokens. Its context is that of the turn before, the answer to it, and ``given``. Turns of several
    branches can be open at the same time."""

    sample: str
    turn: int
    given: bytes  # int32: the prompt in the first turn, the observation in later turns
    max_tokens: int
    temperature: float
    stop_token_ids: list[int]
    attempt: int = 0  # of the LeaseTrajectory
    lease: int = 0  # of the LeaseTrajectory
    stop: list[str] = []  # as in SamplingParams
    min_tokens: int = 0  # as in SamplingParams
    prefix_tokens: int = 0  # of the context, before ``given``
    prefix: str = ""  # context_digest of them; empty in the first turn
    branch: str = ""  # see rljob.protocol.branches


class PoolAnswer(msgspec.Struct, array_like=True):
    """What an engine of a frozen pool answered to a question of a loop. ``branch``, ``question`` and ``number`` are its
    key in the sample: a loop that runs again and asks the same takes it instead of asking."""

    branch: str  # that asked, see rljob.protocol.branches
    question: str  # digest of what was asked of which pool, and how: 32 hex digits
    number: int  # of equal questions of the branch, from 0
    turn: int  # turns of the branch before it, with those that it continues
    pool: str
    text: str
    finish: str  # stop | length


class PoolAnswered(Message):
    """A frozen pool answered a question of a loop. The loop gets the answer once it is stored: repeated until
    PoolAnswerStored."""

    sample: str
    answer: PoolAnswer
    attempt: int = 0  # of the LeaseTrajectory
    lease: int = 0  # of the LeaseTrajectory


class TrajectoryScored(Message):
    """The trajectory ended; repeated until acknowledged. One about an attempt that was thrown away, or from a runner
    that does not hold the lease any more, is acknowledged and ignored."""

    sample: str
    reward: float
    metrics: dict[str, float]
    text: str  # the last answer of ``branch`` as text, cut to 4,096 characters, for people
    turns: int  # that the loop made
    attempt: int = 0  # of the LeaseTrajectory
    turn_rewards: list[float] = []  # of the first turns by branch; the last turn gets the rest of ``reward``
    lease: int = 0  # of the LeaseTrajectory
    branch: str = ""  # that was scored; see rljob.protocol.branches
    states: list[str] = []  # of each turn by branch: state_digest before it, or empty; empty: no turn has one
    logprobs: dict[str, bytes] = {}  # role of a model of a frozen pool → float32, as in SampleTokens.models


class TrajectoryFailed(Message):
    """The trajectory cannot be finished: recorded, the group is replaced. Repeated until AckTrajectories; an old
    attempt's or an old lease's is ignored as in TrajectoryScored."""

    sample: str
    reason: str
    attempt: int = 0  # of the LeaseTrajectory
    lease: int = 0  # of the LeaseTrajectory


class GroupFiltered(Message):
    """Answer to FilterGroup. Repeated until AckGroups; an old number's is ignored as in TrajectoryScored."""

    group: str
    number: int  # of the FilterGroup
    accepted: bool
    reason: str = ""  # why the function could not decide: the group fails; empty: it did


# --- coordinator -> runner --------------------------------------------------------------------------------------------


class TurnTokens(msgspec.Struct, array_like=True):
    """A finished turn: what was added to the context before it, and what the model wrote."""

    turn: int
    given: bytes  # int32, as in GenerateRequest
    token_ids: bytes  # int32
    finish: str  # stop | length
    branch: str = ""  # see rljob.protocol.branches


class LeaseTrajectory(Message):
    """Lease of a trajectory. ``turns`` are finished turns of an earlier lease, and ``answers`` those of frozen pools:
    take them instead of asking. One with another ``lease`` than the trajectory in hand takes its place."""

    sample: str
    task: str
    row: int
    split: str  # train | heldOut
    turns: list[TurnTokens]
    attempt: int = 0
    lease: int = 0
    answers: list[PoolAnswer] = []


class GenerateResult(Message):
    """Answer to GenerateRequest."""

    sample: str
    turn: int
    token_ids: bytes  # int32
    finish: str  # stop | length
    context: str  # context_digest of the context that it was generated from
    branch: str = ""  # as in GenerateRequest


class PoolAnswerStored(Message):
    """Answer to PoolAnswered. ``answer`` is the first one with its key, which counts."""

    sample: str
    answer: PoolAnswer


class Cancel(Message):
    """Drop these trajectories."""

    samples: list[str]


class AckTrajectories(Message):
    """The coordinator has stored these; forget them."""

    samples: list[str]


class FilterGroup(Message):
    """Answer with GroupFiltered whether the task's groupFilter.function accepts these rewards. ``number`` is unique in
    the run and growing, also over leases; one with a higher number than that of the group in hand takes its place."""

    group: str
    task: str
    number: int
    rewards: list[float]  # of the members that would be trained, in order


class AckGroups(Message):
    """The coordinator has stored the answers to these numbers, or does not need them any more; forget them."""

    numbers: list[int]


FromRunner: TypeAlias = (
    RegisterRunner | GenerateRequest | PoolAnswered | TrajectoryScored | TrajectoryFailed | GroupFiltered
)
ToRunner: TypeAlias = (
    LeaseTrajectory | GenerateResult | PoolAnswerStored | Cancel | AckTrajectories | FilterGroup | AckGroups | Reject
)
