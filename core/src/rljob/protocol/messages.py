"""Messages between the processes: one WebSocket each from agents, runners and trainer rank 0 to the coordinator.

A frame is a msgpack list of messages, at most ``MAX_FRAME_BYTES`` long. Arrays are raw little-endian bytes: token ids
int32, log-probabilities float32 (natural logarithm). Everything a sender must not lose is sent again after a
reconnect until it is acknowledged; every receiver takes repetitions.

``sample`` names one (prompt, member): ``g17.3`` is member 3 of the 17th training group, ``e20.17.0`` member 0 of row
17 of the evaluation at policy version 20. ``attempt`` counts fresh sampling streams: of a request (RequestId) those of
its turn; of a lease and of the messages of its runner those that were discarded before it. ``lease`` is the number
of a lease, unique in the run and growing: messages of the holder of another lease do not count.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import blake3
import msgspec

MAX_FRAME_BYTES = 64 << 20
MESSAGES_PER_FRAME = 256
DIGEST_BYTES = 16
"""Length of context_digest; its text has twice as many characters."""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)
"""What a msgspec decoder raises on arbitrary bytes: not only its own errors."""


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class RequestId(msgspec.Struct, array_like=True):
    """A turn's generation request: the unit engines work on and acknowledge."""

    sample: str
    turn: int
    attempt: int
    branch: str = ""  # see rljob.protocol.branches

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Sample, turn, attempt and branch."""
        return (self.sample, self.turn, self.attempt, self.branch)


class VersionSpan(msgspec.Struct, array_like=True):
    """Tokens [start, end) of a completion were sampled under policy ``version``."""

    version: int
    start: int
    end: int


# --- agent -> coordinator ---------------------------------------------------------------------------------------------


class RegisterEngine(Message):
    """First message of an agent's connection. ``lineage``/``version`` are of the weights the engine serves, -1 when it
    has none acknowledged. ``running`` are requests in hand, ``unacknowledged`` completions will be sent again."""

    instance: str  # changes with every start of the engine server
    pool: str
    max_concurrency: int  # requests that run at a time
    max_model_length: int  # tokens
    lineage: int
    version: int
    running: list[RequestId]
    digest: str = ""  # of the weights served, see rljob.protocol.weights; empty when none
    pod: str = ""  # RLJOB_INSTANCE of the agent: the same for all its servers; empty outside a cluster


class Completion(msgspec.Struct, array_like=True):
    """What one Generate produced. On finish ``abort`` the tokens are a prefix to continue from."""

    request_id: RequestId
    token_ids: bytes  # int32; without the prompt
    logprobs: bytes  # float32, one per token id
    spans: list[VersionSpan]  # cover all tokens, in order
    finish: str  # stop | length | abort
    seconds: float  # in the engine, queueing there included
    context: str  # context_digest of the context that the engine got


class Completions(Message):
    """Finished or aborted requests; repeated until acknowledged."""

    items: list[Completion]


class PrefixMissing(Message):
    """The agent does not have the prefix of a Generate, or it has another one: it waits for the whole context."""

    request_id: RequestId


class GenerationFailed(Message):
    """The engine could not do it. ``permanent``: no engine will (bad request); else dispatch it again."""

    request_id: RequestId
    reason: str
    permanent: bool


class WeightAck(Message):
    """The engine serves these weights. ``digest``: of the bytes received, see rljob.protocol.weights.
    ``probe_error`` and ``probe_mean``: largest and mean |difference| of probe log-probabilities in nats, -1 when no
    probe was sent."""

    update: int
    lineage: int
    version: int
    digest: str
    probe_error: float
    probe_mean: float
    seconds: float
    pause_seconds: float  # from the beginning of the pause to the end of the resume
    seconds_since_resume: float  # the engine generates again during them, while the probe is scored


class WeightFailed(Message):
    """An update did not commit; the engine stays paused and takes another, or restarts under a new instance."""

    update: int
    reason: str


HEARTBEAT_SECONDS = 5.0
"""Interval of an agent's heartbeats."""


class EngineHeartbeat(Message):
    """Every HEARTBEAT_SECONDS. ``state``: starting | ready | updating | leaving (it ends, and takes nothing more)."""

    state: str
    running: int
    waiting: int  # held by the agent until the engine has room
    restarts: int  # of the engine server since the agent started


class EngineCrashed(Message):
    """The engine server ended by itself and is started again, or the agent gives up and exits. Also said by an agent
    that has not registered an engine yet."""

    pool: str
    reason: str  # one sentence: how it ended, and the error it named
    last_lines: str  # of the server's log
    restarts: int  # as in EngineHeartbeat
    starting: bool  # it had not served anything yet
    final: bool = False  # the agent starts no other server and exits


# --- coordinator -> agent ---------------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, array_like=True):
    """How to sample, and where an answer ends: with a stop token or the token that completes a stop string, unless it
    is one of its first ``min_tokens`` tokens. The last ``answered`` tokens of the context are the beginning of the
    answer, which another request generated. ``max_tokens`` counts new tokens only."""

    temperature: float  # 0: greedy
    max_tokens: int
    stop_token_ids: list[int]
    seed: int  # < 2**63
    stop: list[str] = []
    min_tokens: int = 0
    answered: int = 0


class Generate(Message):
    """Generate a completion. Idempotent by ``request_id``. An agent whose engine has no weights yet drops it: it was
    meant for the engine before, and the registration of this one has it dispatched again.

    The engine gets the context of the turn, and on continuation what was already generated: the first ``prefix_tokens``
    tokens of the context and the answer that the agent returned last for this branch of the sample, or, before its
    first answer, for the branch that it was made from; then ``token_ids``."""

    request_id: RequestId
    token_ids: bytes  # int32
    sampling: SamplingParams
    prefix_tokens: int = 0
    context: str = ""  # context_digest of what the engine gets; empty if ``token_ids`` are all of it


class Forget(Message):
    """Branches that ended, or continue at another engine: their contexts are not needed here any more."""

    contexts: list[str]  # rljob.protocol.branches.context_name


class Abort(Message):
    """Stop these; each ends as a Completion with finish ``abort``, or, with ``discard``, without a message."""

    request_ids: list[RequestId]
    discard: bool


class AckCompletions(Message):
    """The coordinator has stored these; forget them."""

    request_ids: list[RequestId]


class ParameterMeta(msgspec.Struct, array_like=True):
    """One tensor of the model, Hugging Face name."""

    name: str
    dtype: str  # torch's name: float32, bfloat16
    shape: list[int]


class Probe(msgspec.Struct, array_like=True):
    """Fixed sequences and the trainer's log-probability of each token but the first, at temperature 1."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


class PrepareWeights(Message):
    """Join ``group`` (unless joined already), pause, receive all parameters, commit, resume, probe, answer with
    WeightAck or WeightFailed. The trainer is rank 0, the engine's workers follow."""

    update: int
    lineage: int
    version: int
    group: str  # the nonce: a member proves that it knows it, and never sends it to another member
    address: str
    port: int
    world_size: int
    transport: str  # gloo | nccl | ipc
    bucket_bytes: int
    parameters: list[ParameterMeta]  # in wire order
    probe: Probe
    in_flight: str  # keep | keepStaleCache | abort | wait
    timeout_seconds: float
    engine: str = ""  # instance it is meant for; an agent whose engine is another one by now drops it


class RestartEngine(Message):
    """Kill the engine server and start a new one (its weights cannot be trusted)."""

    reason: str


# --- trainer -> coordinator -------------------------------------------------------------------------------------------


class RefusedCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint that a trainer did not load."""

    step: int
    reason: str  # sentence that names the damaged file


class RegisterTrainer(Message):
    """First message of a trainer's connection. The process remembers the incarnation it was given and says it again
    on a reconnect (0 when new), followed by its last StepDone and Checkpointed."""

    instance: str
    incarnation: int
    step: int  # optimizer steps applied to the weights it holds
    digest: str = ""  # of the checkpoint that it loaded, as in Checkpointed; empty for the initial model
    refused: list[RefusedCheckpoint] = []  # newer than the one that it loaded: damaged or missing


class StepDone(Message):
    """Batch ``step`` was applied: weights are now version step + 1."""

    incarnation: int
    step: int
    metrics: dict[str, float]
    advantages: bytes = b""  # float32, one of each sample in the order of Train.samples; empty when not known any more


class CheckpointCopied(Message):
    """The weights of version ``step`` are copied, and the trainer writes the copy while it executes further commands.
    Checkpointed follows, unless the process ends before."""

    incarnation: int
    step: int


class Checkpointed(Message):
    """A checkpoint of version ``step`` is durable at ``path`` (relative to the storage)."""

    incarnation: int
    step: int
    path: str
    digest: str = ""  # of its record (rljob.protocol.checkpoint_record)


class WeightGroupReady(Message):
    """For one engine of a SendWeights: where its group is; the trainer is broadcasting or waiting for it to join."""

    incarnation: int
    update: int
    engine: str
    group: str
    address: str
    port: int
    world_size: int
    transport: str
    parameters: list[ParameterMeta]
    probe: Probe


class WeightsSent(Message):
    """SendWeights to one engine ended (``engine`` empty: only the digest was asked for). ``error`` empty: all bytes
    were sent, ``digest`` is over them."""

    incarnation: int
    update: int
    engine: str
    digest: str
    seconds: float
    error: str


class TrainerBlocked(Message):
    """The trainer is blocked (for example, disk full) and keeps retrying; empty ``reason``: no longer blocked."""

    incarnation: int
    reason: str


class TrainerFailed(Message):
    """The trainer cannot continue, and a restart does not help (bad batch, mismatch over the bound): the run ends."""

    incarnation: int
    reason: str


# --- coordinator -> trainer -------------------------------------------------------------------------------------------


class TrainerRegistered(Message):
    """Answer to RegisterTrainer. If the trainer's checkpoint is older than ``step``, it gets the batches between again.

    ``unseen``: steps of recorded checkpoints that are newer than the one it loaded and that it has not refused. The
    previous trainer may have written them meanwhile. The process ends if one of them exists, and the next one loads it;
    otherwise it refuses them and registers again. Until then it gets no command."""

    incarnation: int
    step: int  # version of the run
    unseen: list[int] = []


class BatchSample(msgspec.Struct, array_like=True):
    """Scalars of one sample of a batch."""

    sample: str
    group: str
    reward: float
    prompt_tokens: int  # of the first turn
    response_tokens: int  # that the model wrote, in all turns
    total_tokens: int  # of all sequences: prompt, model and observations
    min_version: int
    temperature: float
    max_tokens: int
    sequences: list[int] = []  # tokens of each sequence; empty: there is one


class Train(Message):
    """Apply batch ``step`` (0-based) to weights of version ``step``, then StepDone. Samples are in group order. Tokens
    are pulled: POST /v1/batches/STEP/shard?incarnation=K answers zstd(msgpack(list[SampleTokens])) of the samples that
    its body selects, see rljob.protocol.shards."""

    incarnation: int
    step: int
    samples: list[BatchSample]
    check_initial_logprobs: bool  # only version 0 was published: log-probabilities must equal the engine's
    compare_logprobs: bool = True  # every sample of version ``step`` was generated with the weights of this trainer


class Segment(msgspec.Struct, array_like=True):
    """Tokens [start, end) of a sample. Each turn has one ``model`` segment, which is empty if the model wrote no token;
    before it comes the ``prompt`` (first turn) or an ``observation`` (later turns), unless it has no tokens. Each
    sequence but the first begins with a ``prefix`` if it shares turns with an earlier one: they are trained there."""

    kind: Literal["prompt", "model", "observation", "prefix"]
    start: int
    end: int
    reward: float = 0.0  # of the turn; 0 for prompts and observations


class SampleTokens(msgspec.Struct, array_like=True):
    """Tokens of one sample of a batch: the prompt, then what the model wrote and observed, turn by turn. A sample with
    branches has several such sequences, one after the other: one for each branch that no other branch continues.

    ``segments`` cover all tokens in order. Their rewards add up to the sample's reward, except for rounding.
    """

    sample: str
    token_ids: bytes  # int32, all sequences
    logprobs: bytes  # float32, all sequences; 0 where the model did not write, and in a prefix
    segments: list[Segment]
    spans: list[VersionSpan]  # over all sequences
    ends: list[int] = []  # of each sequence; empty: there is one

    @property
    def loss_mask(self) -> bytes:
        """uint8 over all sequences; 1 where the model wrote, except in a prefix."""
        return b"".join((b"\x01" if s.kind == "model" else b"\x00") * (s.end - s.start) for s in self.segments)


class EngineTarget(msgspec.Struct, array_like=True):
    """An engine to send weights to. ``fresh`` makes the trainer open a new group for it, with all its ``workers``."""

    engine: str  # instance
    fresh: bool
    workers: int


class SendWeights(Message):
    """Send the weights held to these engines; with none, answer WeightsSent with the digest alone."""

    incarnation: int
    update: int
    engines: list[EngineTarget]


class CancelSend(Message):
    """The engine is gone: give up sending to it at once and answer WeightsSent with an error. Taken while SendWeights
    is being executed."""

    incarnation: int
    update: int
    engine: str


class Checkpoint(Message):
    """Write a checkpoint of the current weights: CheckpointCopied once further commands can be executed, Checkpointed
    once it is durable. A trainer that still writes another one waits for it first. ``remove`` are steps whose
    checkpoints are no longer kept."""

    incarnation: int
    step: int
    remove: list[int]


class RefuseCheckpoint(Message):
    """The checkpoint of ``step`` that this process loaded is not what the ledger records: set it aside and exit with 1;
    the next process loads the checkpoint before it."""

    incarnation: int
    step: int
    reason: str


class Stop(Message):
    """The run is over, or this incarnation is: exit 0."""

    reason: str


# --- runner -> coordinator --------------------------------------------------------------------------------------------


class RegisterRunner(Message):
    """First message of a runner's connection. ``driving`` are its trajectories: sample → lease. ``held_out`` are the
    sizes of the tasks' held-out splits in rows; a task not named has endless ones. After the last row of a split its
    first row follows."""

    instance: str
    capacity: int  # trajectories of training that it takes at a time, and as many of evaluations
    driving: dict[str, int]
    held_out: dict[str, int] = {}


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


# --- both ways --------------------------------------------------------------------------------------------------------


class Reject(Message):
    """Coordinator to anyone: the message or registration is refused; ``fatal`` means exit with code 2."""

    reason: str
    fatal: bool


FromAgent: TypeAlias = (
    RegisterEngine
    | Completions
    | PrefixMissing
    | GenerationFailed
    | WeightAck
    | WeightFailed
    | EngineHeartbeat
    | EngineCrashed
)
ToAgent: TypeAlias = Generate | Forget | Abort | AckCompletions | PrepareWeights | RestartEngine | Reject
FromTrainer: TypeAlias = (
    RegisterTrainer
    | StepDone
    | CheckpointCopied
    | Checkpointed
    | WeightGroupReady
    | WeightsSent
    | TrainerBlocked
    | TrainerFailed
)
ToTrainer: TypeAlias = (
    TrainerRegistered | Train | SendWeights | CancelSend | Checkpoint | RefuseCheckpoint | Stop | Reject
)
FromRunner: TypeAlias = (
    RegisterRunner | GenerateRequest | PoolAnswered | TrajectoryScored | TrajectoryFailed | GroupFiltered
)
ToRunner: TypeAlias = (
    LeaseTrajectory | GenerateResult | PoolAnswerStored | Cancel | AckTrajectories | FilterGroup | AckGroups | Reject
)

_encoder = msgspec.msgpack.Encoder()


def context_digest(token_ids: bytes) -> str:
    """Return the digest of the token ids that a completion is generated from: 32 hex digits."""
    return blake3.blake3(token_ids).hexdigest(DIGEST_BYTES)


def encode(message: Any) -> msgspec.Raw:
    """Return one message encoded, to be put into a frame later."""
    return msgspec.Raw(_encoder.encode(message))


def encode_frame(messages: list[Any]) -> bytes:
    """Return one frame holding ``messages``, encoded already or not."""
    return _encoder.encode(messages)


def frame_decoder(union: Any) -> msgspec.msgpack.Decoder[list[Any]]:
    """Return a decoder of frames whose messages are of ``union``, for example FromAgent."""
    return msgspec.msgpack.Decoder(list[union])


def frame_length(outbox: list[msgspec.Raw]) -> int:
    """Return how many of the first encoded messages go into one frame: at least one."""
    size = 0
    for count, message in enumerate(outbox[:MESSAGES_PER_FRAME]):
        size += len(memoryview(message))
        if count and size > MAX_FRAME_BYTES // 2:
            return count
    return min(len(outbox), MESSAGES_PER_FRAME)
