"""What GET /v1/status answers: a RunStatus as JSON. Coordinator -> CLI, and later the RLJob's status.run.

Field names are snake_case on the wire. A reader decodes with :func:`decode_status`; fields it does not know are
ignored, so an older CLI can watch a newer coordinator.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

State: TypeAlias = Literal["Starting", "Running", "Evaluating", "Finishing", "Succeeded", "Failed"]
"""Starting: no batch can be made yet (engines or trainer missing). Running: between the first batch and the last.
Evaluating: nothing but evaluation is under way. Finishing: the last checkpoint and evaluation. Then one of the two
last, for good: the coordinator goes on answering so that readers see it."""


class Progress(msgspec.Struct):
    """How far the run is."""

    step: int = 0  # batches applied: the version of the policy
    steps: int = 0  # training.steps
    seconds: float = 0.0  # wall clock the run has been up, over all coordinator starts
    eta_seconds: float = -1.0  # wall clock left; -1: not known yet


class PolicyStatus(msgspec.Struct):
    """The newest published weights."""

    version: int = -1  # -1: none yet
    lineage: int = -1
    digest: str = ""  # blake3 hex over the bytes in wire order


class CheckpointStatus(msgspec.Struct):
    """The newest durable checkpoint."""

    step: int = -1  # -1: none yet
    path: str = ""  # relative to the storage; Hugging Face format


class Queue(msgspec.Struct):
    """How many samples or groups are somewhere, for example generating, scoring, ready."""

    name: str
    value: int


class Metric(msgspec.Struct):
    """A figure of now: reward_mean, staleness_max, staleness_mean, tokens_per_second, accuracy and others."""

    name: str
    value: float


class EvaluationResult(msgspec.Struct):
    """One task on held-out problems at one version. The first entry is before training, the last after it."""

    version: int
    task: str
    accuracy: float  # share of problems with reward >= 1
    problems: int
    mean_reward: float


class HistoryPoint(msgspec.Struct):
    """One trained batch, oldest first."""

    step: int  # 0-based index of the batch
    reward: float  # mean over its samples
    staleness: float  # mean over its samples, in versions
    tokens_per_second: float  # sampled tokens, over the step
    seconds: float  # since the run's first start, when the batch was applied


class PartStatus(msgspec.Struct):
    """A connected part."""

    role: str  # agent | runner | trainer
    instance: str
    state: str  # agent: starting | ready | updating; others: connected
    restarts: int = 0  # agent: of its engine server


class RunStatus(msgspec.Struct):
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
    evaluations: list[EvaluationResult] = []
    history: list[HistoryPoint] = []
    parts: list[PartStatus] = []


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RunStatus)


def encode_status(status: RunStatus) -> bytes:
    """Return the status as JSON."""
    return _encoder.encode(status)


def decode_status(data: bytes) -> RunStatus:
    """Return the status read from JSON.

    Raises:
        msgspec.DecodeError: the bytes are not a status.
    """
    return _decoder.decode(data)
