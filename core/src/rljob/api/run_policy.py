"""How a job is run: scheduling, weight updates, checkpoints, failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import Model, Name
from rljob.api.kubernetes import Gang, Topology


class Redundancy(Model):
    """Work started beyond what a batch needs, so that a batch need not wait for its slowest part."""

    groups: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups started beyond the admission bound. Those that a batch does not need wait for the next one if their
    deadline allows, else they end as `surplus`: this favours short answers."""
    members: Annotated[int, Field(ge=0, le=1024)] = 0
    """Samples started in each group beyond samplesPerPrompt; the first to be scored form the group."""


class Scheduling(Model):
    """How samples are scheduled."""

    redundancy: Redundancy = Redundancy()
    """Redundant work."""
    on_deadline: Literal["wait", "regenerate"] = "wait"
    """What happens to a group that is not complete when the last batch it may join is due. `wait`: the batch waits
    for it (unbiased). `regenerate`: it ends as `expired` and its prompt starts afresh under current weights."""
    gang: Gang = Gang()
    """Pods that start together or not at all."""
    priority_class_name: Name | None = None
    """PriorityClass of the job's pods."""
    topology: Topology | None = None
    """How near one another pods are placed; anywhere when left out."""


class WeightSync(Model):
    """How new weights reach the engines."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """`auto`: nccl when trainer and engines have NVIDIA GPUs of their own, else gloo. `ipc`: memory of GPUs
    that trainer and engines share."""
    in_flight: Literal["keep", "keepStaleCache", "abort", "wait"] = "keep"
    """Sequences in flight at an update. `keep`: go on under the new weights, cache recomputed. `keepStaleCache`: go
    on with the old cache. `abort`: interrupted and continued from their prefix. `wait`: the update waits for them."""
    groups: Literal["perEngine", "shared"] = "perEngine"
    """`perEngine`: every engine is sent the weights by itself, so that one that dies holds up no other. `shared`: all
    engines of a pool at once."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 16 << 20
    """Size of one broadcast in bytes."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """An update of one engine that takes longer has failed; the engine is given weights anew, or restarted."""
    probe_tolerance: Annotated[float, Field(gt=0, le=10)] = 1e-4
    """Largest difference between trainer and engine in the log-probability of a probe token (float32: the run stops
    when exceeded; bfloat16: a warning)."""


class Checkpoints(Model):
    """Checkpoints of the trainer, in Hugging Face format with the optimizer's state beside it."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 20
    """Steps between checkpoints; there is one after the last step besides."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Checkpoints kept."""


class Tracking(Model):
    """Where the figures of the run go. metrics.jsonl in the run directory is always written."""

    tensorboard: bool = True
    """Write TensorBoard's event files to tensorboard/ in the job's storage."""


class FailurePolicy(Model):
    """What is done about parts that die."""

    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    """Restarts of one part in a run before the run fails. Ten minutes without a death forgive one."""
    hang_seconds: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """A part whose event loop has not run for so long (a stopped or hanging process) is killed and restarted."""
    disruption: Literal["Allow", "Block"] = "Allow"
    """Whether pods of the trainer may be evicted, as by the drain of a node. `Allow`: it goes on from its last
    checkpoint on another node, which counts as no restart. `Block`: evictions are refused; a drain waits for the end of
    the job."""
    pending_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """The run fails when pods of the trainer or of engines have found no node, or were refused, for so long; they
    may wait for ever when left out."""
