"""What GET /v1/status answers and status.json holds: a RunStatus as JSON. In a cluster the same, without what grows
with the run, is the RLJob's status.run (rljob.api.status.Run).

Field names are camelCase on the wire. A reader decodes with :func:`decode_status`; fields it does not know are
ignored, so an older CLI can watch a newer coordinator.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import msgspec

State: TypeAlias = Literal["Starting", "Running", "Evaluating", "Finishing", "Succeeded", "Suspended", "Failed"]
"""Starting: no batch can be made yet (engines or trainer missing). Running: between the first batch and the last.
Evaluating: nothing but evaluation is under way. Finishing: the last checkpoint and evaluation. Then one of the three
last, for good: the coordinator goes on answering so that readers see it. Suspended: somebody asked for it, everything
is durable, and the run goes on when its parts are started again."""

NOTE_HEADER = "Rljob-Note"
"""HTTP header of an answer to a reader: a sentence on an answer that is empty or not all."""


class Progress(msgspec.Struct, rename="camel"):
    """How far the run is."""

    step: int = 0  # batches applied: the version of the policy
    steps: int = 0  # training.steps
    seconds: float = 0.0  # wall clock the run has been up, over all coordinator starts
    eta_seconds: float = -1.0  # wall clock left; -1: not known, or it does not go on
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
    """How many samples or groups are somewhere, for example generating, scoring, ready."""

    name: str
    value: int


class Metric(msgspec.Struct, rename="camel"):
    """A metric of the last step, named as in metrics.jsonl (reward/mean, staleness/max, trainer/loss), or of now
    (tokens_per_second, seconds_training)."""

    name: str
    value: float


class EvaluationResult(msgspec.Struct, rename="camel"):
    """One task on held-out problems at one version. The first entry is before training, the last after it."""

    version: int
    task: str
    accuracy: float  # share of problems with reward >= 1
    problems: int
    mean_reward: float
    failed: int = 0  # of the problems: not scored, counted as reward 0


class HistoryPoint(msgspec.Struct, rename="camel"):
    """One trained batch, oldest first. The status carries at most 512 of them, evenly thinned, the newest always;
    metrics.jsonl in the storage has all."""

    step: int  # 0-based index of the batch
    reward: float  # mean over its samples
    staleness: float  # mean over its samples, in versions
    tokens_per_second: float  # sampled tokens, over the step
    seconds: float  # since the run's first start, when the batch was applied


class PartStatus(msgspec.Struct, rename="camel"):
    """A connected part."""

    role: str  # agent | runner | trainer
    instance: str
    state: str  # agent: starting | ready | updating; others: connected
    restarts: int = 0  # agent: of its engine server
    message: str = ""  # agent: why its engine server ended last; trainer: what it waits for
    running: int = 0  # agent: requests its engine works on
    waiting: int = 0  # agent: requests held until the engine has room


class EngineStatus(msgspec.Struct, rename="camel"):
    """An engine that is connected."""

    name: str  # in a cluster of its pod
    load: int = 0  # requests it has
    drained: bool = False  # it was to be drained and has nothing left to do


class RunStatus(msgspec.Struct, rename="camel"):
    """The whole status."""

    state: State
    reason: str = ""  # one CamelCase word, set when Failed
    message: str = ""  # a sentence for a person
    incarnation: int = 0  # of the trainer
    progress: Progress = msgspec.field(default_factory=Progress)
    policy: PolicyStatus = msgspec.field(default_factory=PolicyStatus)
    last_checkpoint: CheckpointStatus = msgspec.field(default_factory=CheckpointStatus)
    queues: list[Queue] = []
    metrics: list[Metric] = []
    staleness: str = ""  # mean and most of the last batch, for a column: 0.8/1
    engines: list[EngineStatus] = []
    observed_generation: int = 0  # of the RLJob: the spec that was acted on last (suspend); 0 outside a cluster
    evaluations: list[EvaluationResult] = []
    history: list[HistoryPoint] = []
    parts: list[PartStatus] = []


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RunStatus)


def encode_status(status: RunStatus) -> bytes:
    """Return the status as JSON."""
    return _encoder.encode(status)


NOT_IN_CLUSTER = ("history", "parts")
"""Fields that are not in status.run: they grow with the run, or say what the operator sees of the pods."""
MOST_ENTRIES = {"queues": 64, "metrics": 64, "engines": 1024}
MOST_EVALUATIONS = 64
"""In status.run, which is what is known of a run once its coordinator is gone: half the first, half the newest."""
LONGEST_TEXT = 4096


def run_fields(status: RunStatus) -> dict[str, Any]:
    """Return the status as status.run of an RLJob: JSON that :class:`rljob.api.status.Run` takes."""
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
