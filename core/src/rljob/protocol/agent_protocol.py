"""Messages between agents and the coordinator. rljob.protocol.shared_messages has what all messages have in common."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rljob.protocol.shared_messages import Message, ParameterMeta, Probe, Reject, VersionSpan


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
    parameters: list[ParameterMeta]  # in wire order; empty: those of ``tensors``, which this connection has had
    probe: Probe
    in_flight: str  # keep | keepStaleCache | abort | wait
    timeout_seconds: float
    engine: str = ""  # instance it is meant for; an agent whose engine is another one by now drops it
    tensors: str = ""  # digest of the list of parameters, see rljob.protocol.known_tensors; empty: it is here


class RestartEngine(Message):
    """Kill the engine server and start a new one (its weights cannot be trusted)."""

    reason: str


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
