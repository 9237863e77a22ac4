"""Run policies of a manifest: scheduling, weight updates, checkpoints, tracking, failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import Model, Name
from rljob.api.field_metadata import FieldMeta
from rljob.api.kubernetes import NO_PODS, Gang, Topology
from rljob.api.model_address import S3_PATTERN


class Redundancy(Model):
    """Work started beyond what a batch needs, so that a batch does not wait for its slowest samples."""

    groups: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups started beyond the admission bound. Groups that a batch does not need wait for the next batch if their
    deadline allows, else they end as `surplus`. This favours short answers."""
    members: Annotated[int, Field(ge=0, le=1024)] = 0
    """Samples started in each group beyond samplesPerPrompt. When a batch would wait for the group, the samples that
    have no score yet end as `surplus`. The trained samples are drawn at random from those with a score."""


class Scheduling(Model):
    """How samples are scheduled."""

    redundancy: Redundancy = Redundancy()
    """Redundant groups and samples."""
    on_deadline: Literal["wait", "regenerate"] = "wait"
    """Action for a group that is incomplete when the last batch it may join is due. `wait`: the batch waits
    for it (unbiased). `regenerate`: it ends as `expired` and its prompt starts again under current weights."""
    gang: Annotated[Gang, FieldMeta(reader="objects", mutable="never", local=NO_PODS)] = Gang()
    """Gang scheduling of the trainer and the engines."""
    priority_class_name: Annotated[Name | None, FieldMeta(reader="objects", mutable="never", local=NO_PODS)] = None
    """Name of the PriorityClass of the job's pods."""
    topology: Annotated[Topology | None, FieldMeta(reader="objects", mutable="never", local=NO_PODS)] = None
    """Topology-aware placement of the gang's pods. Default: any node."""


class Bfloat16Tolerance(Model):
    """Largest difference between the log-probabilities of trainer and engine in bfloat16. The run stops when it is
    exceeded."""

    mean: Annotated[float, Field(gt=0, le=10)] = 0.03
    """Mean over the tokens of the probe after every update, and over a batch's samples of the current version."""
    max: Annotated[float, Field(gt=0, le=100)] = 0.5
    """One token of the probe."""


class WeightSync(Model):
    """Transfer of new weights to the engines."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """`auto`: nccl if the trainer and all engines run on NVIDIA GPUs, else gloo. `ipc`: the engines copy the weights
    from memory of the trainer, which must be on the same machine; for `rljob run` only."""
    in_flight: Literal["keep", "keepStaleCache", "abort", "wait"] = "keep"
    """Sequences in flight at an update. `keep`: they continue under the new weights with a recomputed KV cache.
    `keepStaleCache`: they continue with the old cache. `abort`: they are interrupted and continue from their prefix.
    `wait`: the update of an engine starts when they have ended; it gets no new ones until then."""
    groups: Annotated[Literal["perEngine", "shared"], FieldMeta(unsupported=("shared",))] = "perEngine"
    """`perEngine`: each engine receives the weights in its own group, so that an engine that crashes blocks no other.
    `shared`: all engines of a pool at once."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 16 << 20
    """Size of one broadcast in bytes."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time limit for updating one engine. After this time the update has failed, and the engine is updated again or
    restarted."""
    probe_tolerance: Annotated[float, Field(gt=0, le=10)] = 1e-4
    """In float32 the largest difference between trainer and engine in the log-probability of one token: of the probe
    after every update, and of the first step. Also of the mean over a batch's samples of the current version. The run
    stops when it is exceeded."""
    bfloat16_tolerance: Bfloat16Tolerance = Bfloat16Tolerance()
    """The same if the trainer or an engine uses bfloat16."""


class Checkpoints(Model):
    """Checkpoints of the trainer, in Hugging Face format with the optimizer state beside them."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 20
    """Steps between checkpoints. An additional checkpoint is written after the last step."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of checkpoints kept."""
    uri: Annotated[str | None, Field(pattern=S3_PATTERN, max_length=1024), FieldMeta(reader="components")] = None
    """Where each checkpoint is copied to before it counts: `s3://BUCKET/PREFIX`; each run has a directory of its own
    there. A trainer downloads the newest copy of its run if the storage lacks the checkpoint. `downloads` has the
    address and the credentials."""


class Tracking(Model):
    """Where the metrics of the run are written. metrics.jsonl in the run directory is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/ in the job's storage."""


class FailurePolicy(Model):
    """Reaction to processes and pods that fail."""

    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    """Restarts of a role before the run fails. Each ten minutes without a failure reduce the count by one."""
    hang_seconds: Annotated[float, Field(ge=1, le=86_400), FieldMeta(reader="objects", mutable="never")] = 60.0
    """A process whose event loop has not run for this long (stopped or hung) is killed and restarted. The probes of all
    pods contain this value, and a change would restart every pod; therefore it is immutable in a cluster."""
    stall_seconds: Annotated[float, Field(ge=1, le=86_400), FieldMeta(reader="components")] = 600.0
    """Time without progress. An engine that generates no token for this long although it has requests is restarted, and
    its requests go to other engines. A sample fails if its loop makes no call, or its source no prompt, for this
    long; the time that it waits for an engine, a frozen pool or a reward does not count. It also fails if it asks a
    frozen pool of which no engine has answered for this long."""
    disruption: Annotated[
        Literal["Allow", "Block"], FieldMeta(reader="objects", local="this machine is not drained")
    ] = "Allow"
    """Whether pods of the trainer may be evicted, for example when a node is drained. `Allow`: the trainer continues
    from its last checkpoint on another node, which does not count as a restart. `Block`: evictions are refused, and a
    drain waits for the end of the job."""
    pending_seconds: Annotated[Annotated[int, Field(ge=1, le=2**31 - 1)] | None, FieldMeta(local=NO_PODS)] = None
    """The run fails when pods of the trainer or of engines could not be scheduled or created for this long. Default:
    no limit."""
