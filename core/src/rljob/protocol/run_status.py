"""The status of a run: a RunStatus as JSON in GET /v1/status and status.json.

In a cluster status.run (rljob.api.job_status.RunState) holds the same without NOT_IN_CLUSTER, and with bounded lists.
Field names are camelCase on the wire. A reader decodes with :func:`decode_status`.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from pydantic import TypeAdapter

from rljob.api.job_status import (
    MOST_ENTRIES,
    MOST_EVALUATIONS,
    EngineStatus,
    EvaluationResult,
    Metric,
    RoleLoad,
    RunState,
    StatusPart,
)

NOTE_HEADER = "Rljob-Note"
"""HTTP header of an answer to a reader: a sentence on an answer that is empty or not all. See :func:`encode_note`."""


def encode_note(note: str) -> str:
    """Return a sentence as the value of :data:`NOTE_HEADER`: ``%``, and all that is not printable ASCII, is
    percent-encoded."""
    return quote(note, safe=f"{string.punctuation} ".replace("%", ""))


def decode_note(value: str) -> str:
    """Return the sentence of a :data:`NOTE_HEADER`."""
    return unquote(value)


@dataclass
class HistoryPoint(StatusPart):
    """One trained batch, oldest first. The status holds at most 512 of them, evenly thinned, always with the newest;
    metrics.jsonl in the storage has all."""

    step: int  # 0-based index of the batch
    reward: float  # mean over its samples
    staleness: float  # mean over its samples, in versions
    tokens_per_second: float  # sampled tokens, over the step
    seconds: float  # since the run's first start, when the batch was applied


@dataclass
class ComponentStatus(StatusPart):
    """A connected process."""

    role: str  # agent | runner | trainer
    instance: str
    state: str  # agent: starting | ready | updating | failed; others: connected
    restarts: int = 0  # agent: of its engine server
    message: str = ""  # agent: why its engine server exited last; trainer: why it waits
    running: int = 0  # agent: requests running in its engine
    waiting: int = 0  # agent: requests held until the engine has room
    seconds: dict[str, float] = field(default_factory=dict)
    """agent: seconds of its engine by activity (generating, waiting, paused, dead), with earlier servers of the engine,
    since the start of the coordinator process. They add up to wall-clock time since the engine's first registration."""


@dataclass
class RunStatus(RunState):
    """The whole status. The fields that are declared here replace those of RunState, without their maximum."""

    message: str = ""
    metrics: list[Metric] = field(default_factory=list)
    engines: list[EngineStatus] = field(default_factory=list)
    loads: list[RoleLoad] = field(default_factory=list)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    history: list[HistoryPoint] = field(default_factory=list)
    components: list[ComponentStatus] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    """EVENT/REASON → count since the start of the run; see rljob.coordinator.event_counts."""


_adapter = TypeAdapter(RunStatus)


def encode_status(status: RunStatus) -> bytes:
    """Return the status as JSON."""
    return _adapter.dump_json(status, by_alias=True)


def status_data(status: RunStatus) -> dict[str, Any]:
    """Return the status as JSON types."""
    data: dict[str, Any] = _adapter.dump_python(status, by_alias=True)
    return data


NOT_IN_CLUSTER = ("history", "components", "events")
"""Fields that are not in status.run: they grow with the run, repeat what the operator reads from the pods, or are for
the search of a cause."""
LONGEST_TEXT = 4096


def run_fields(status: RunStatus) -> dict[str, Any]:
    """Return the status as status.run of an RLJob: JSON that :class:`rljob.api.job_status.RunState` takes."""
    fields = status_data(status)
    for name in NOT_IN_CLUSTER:
        del fields[name]
    fields["metrics"] = [metric for metric in fields["metrics"] if math.isfinite(metric["value"])]
    for name, most in MOST_ENTRIES.items():
        fields[name] = fields[name][:most]
    if len(results := fields["evaluations"]) > MOST_EVALUATIONS:
        fields["evaluations"] = results[: MOST_EVALUATIONS // 2] + results[-MOST_EVALUATIONS // 2 :]
    fields["warnings"] = [warning[:LONGEST_TEXT] for warning in fields["warnings"]]
    fields["message"] = fields["message"][:LONGEST_TEXT]
    return fields


def decode_status(data: bytes) -> RunStatus:
    """Return the status read from JSON.

    Raises:
        ValueError: the bytes are not a status.
    """
    return _adapter.validate_json(data)


def status_from(data: Mapping[str, Any]) -> RunStatus:
    """Return the status read from JSON types, for example from status.run.

    Raises:
        ValueError: the data are not a status.
    """
    return _adapter.validate_python(data)
