"""Messages between trainer rank 0 and the coordinator. rljob.protocol.shared_messages has what all messages have in
common."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.shared_messages import Message, ParameterMeta, Probe, Reject

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
    parameters: list[ParameterMeta]  # in wire order; empty: those that SendWeights.tensors names
    probe: Probe
    tensors: str = ""  # digest of the list of parameters, see rljob.protocol.known_tensors; empty: it is here


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


class EarlierSteps(msgspec.Struct, array_like=True, frozen=True):
    """What the steps before a batch leave for it: the same when the batch is applied again."""

    samples: int = 0
    reward_mean: float = 0.0  # over these samples
    reward_squares: float = 0.0  # sum of squared distances from the mean
    kl_coefficient: float | None = None  # of this batch, with algorithm.klTarget

    def with_rewards(self, samples: int, mean: float, squares: float) -> EarlierSteps:
        """Return the same with the rewards of at least one more sample: their number, their mean, and the sum of their
        squared distances from it."""
        total, distance = self.samples + samples, mean - self.reward_mean
        squares += self.reward_squares + distance**2 * self.samples * samples / total
        reward_mean = self.reward_mean + distance * samples / total
        return msgspec.structs.replace(self, samples=total, reward_mean=reward_mean, reward_squares=squares)


class Train(Message):
    """Apply batch ``step`` (0-based) to weights of version ``step``, then StepDone. Samples are in group order. Tokens
    are pulled: POST /v1/batches/STEP/shard?incarnation=K answers zstd(msgpack(list[SampleTokens])) of the samples that
    its body selects, see rljob.protocol.shards."""

    incarnation: int
    step: int
    samples: list[BatchSample]
    check_initial_logprobs: bool  # only version 0 was published: log-probabilities must equal the engine's
    compare_logprobs: bool = True  # every sample of version ``step`` was generated with the weights of this trainer
    earlier: EarlierSteps = EarlierSteps()


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
    tensors: str = ""  # digest of the list of parameters that the coordinator has


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
