"""The status of a run: a RunStatus as JSON in GET /v1/status and status.json.

In a cluster status.run (rljob.api.job_status.RunState) holds the same without fields that grow with the run.

Field names are camelCase on the wire. A reader decodes with :func:`decode_status`; fields it does not know are
ignored, so an older CLI can watch a newer coordinator.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import msgspec

State: TypeAlias = Literal["Starting", "Running", "Evaluating", "Finishing", "Succeeded", "Suspended", "Failed"]
"""Starting: no batch can be made yet (engines or trainer missing). Running: between the first batch and the last.
Evaluating: only evaluation is active. Finishing: the last checkpoint and evaluation. The other three are final, and the
coordinator keeps serving them. Suspended: a user requested it, all state is durable, and the run continues when its
processes start again."""

NOTE_HEADER = "Rljob-Note"
"""HTTP header of an answer to a reader: a sentence on an answer that is empty or not all."""


class Progress(msgspec.Struct, rename="camel"):
    """Progress of the run."""

    step: int = 0  # batches applied: the version of the policy
    steps: int = 0  # training.steps
    seconds: float = 0.0  # wall clock that the run was active, over all coordinator starts
    eta_seconds: float = -1.0  # wall clock left; -1: unknown, or the run is not active
    text: str = ""  # for a column: 12/50 24%


class PolicyStatus(msgspec.Struct, rename="camel"):
    """The newest published weights."""

    version: int = -1  # -1: none yet
    lineage: int = -1
    digest: str = ""  # blake3 hex over the bytes in wire order


class CheckpointStatus(msgspec.Struct, rename="camel"):
    """The newest durable checkpoint."""

    step: int = -1  # -1: none yet
    path: str = ""  # relative to the storage; Hugging Face format


class Queue(msgspec.Struct, rename="camel"):
    """Number of samples or groups in one state, for example generating, scoring, ready."""

    name: str
    value: int


class Metric(msgspec.Struct, rename="camel"):
    """A metric of the last step, named as in metrics.jsonl (reward/mean, staleness/max, trainer/loss), or of now
    (tokens_per_second, seconds_training)."""

    name: str
    value: float


class EvaluationResult(msgspec.Struct, rename="camel"):
    """Result of one task on held-out problems with one policy version; the first is before training, the last after."""

    version: int
    task: str
    accuracy: float  # fraction of problems with reward >= 1
    problems: int
    mean_reward: float
    failed: int = 0  # problems that could not be scored, counted as reward 0


class HistoryPoint(msgspec.Struct, rename="camel"):
    """One trained batch, oldest first. The status holds at most 512 of them, evenly thinned, always with the newest;
    metrics.jsonl in the storage has all."""

    step: int  # 0-based index of the batch
    reward: float  # mean over its samples
    staleness: float  # mean over its samples, in versions
    tokens_per_second: float  # sampled tokens, over the step
    seconds: float  # since the run's first start, when the batch was applied


class ComponentStatus(msgspec.Struct, rename="camel"):
    """A connected process."""

    role: str  # agent | runner | trainer
    instance: str
    state: str  # agent: starting | ready | updating; others: connected
    restarts: int = 0  # agent: of its engine server
    message: str = ""  # agent: why its engine server exited last; trainer: why it waits
    running: int = 0  # agent: requests running in its engine
    waiting: int = 0  # agent: requests held until the engine has room


class EngineStatus(msgspec.Struct, rename="camel"):
    """A connected engine."""

    name: str  # in a cluster the name of its pod
    load: int = 0  # requests in flight
    drained: bool = False  # it is draining and has no requests left


class RunStatus(msgspec.Struct, rename="camel"):
    """The whole status."""

    state: State
    reason: str = ""  # one CamelCase word, set when Failed
    message: str = ""  # explanation for users
    incarnation: int = 0  # of the trainer
    progress: Progress = msgspec.field(default_factory=Progress)
    policy: PolicyStatus = msgspec.field(default_factory=PolicyStatus)
    last_checkpoint: CheckpointStatus = msgspec.field(default_factory=CheckpointStatus)
    queues: list[Queue] = []
    metrics: list[Metric] = []
    staleness: str = ""  # mean/maximum of the last batch, for a column: 0.8/1
    engines: list[EngineStatus] = []
    observed_generation: int = 0  # generation of the RLJob's spec that was acted on (suspend); 0 outside a cluster
    evaluations: list[EvaluationResult] = []
    history: list[HistoryPoint] = []
    components: list[ComponentStatus] = []


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RunStatus)


def encode_status(status: RunStatus) -> bytes:
    """Return the status as JSON."""
    return _encoder.encode(status)


NOT_IN_CLUSTER = ("history", "components")
"""Fields that are not in status.run: they grow with the run, or repeat what the operator reads from the pods."""
MOST_ENTRIES = {"queues": 64, "metrics": 64, "engines": 1024}
MOST_EVALUATIONS = 64
"""Maximum in status.run, which remains after the coordinator is deleted: half the first, half the newest."""
LONGEST_TEXT = 4096


def run_fields(status: RunStatus) -> dict[str, Any]:
    """Return the status as status.run of an RLJob: JSON that :class:`rljob.api.job_status.RunState` takes."""
    fields: dict[str, Any] = msgspec.to_builtins(status)
    for name in NOT_IN_CLUSTER:
        del fields[name]
    fields["metrics"] = [metric for metric in fields["metrics"] if math.isfinite(metric["value"])]
    for name, most in MOST_ENTRIES.items():
        fields[name] = fields[name][:most]
    if len(results := fields["evaluations"]) > MOST_EVALUATIONS:
        fields["evaluations"] = results[: MOST_EVALUATIONS // 2] + results[-MOST_EVALUATIONS // 2 :]
    fields["message"] = fields["message"][:LONGEST_TEXT]
    return fields


def decode_status(data: bytes) -> RunStatus:
    """Return the status read from JSON.

    Raises:
        msgspec.DecodeError: the bytes are not a status.
    """
    return _decoder.decode(data)
