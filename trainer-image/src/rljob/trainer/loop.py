"""The trainer's main loop: load, register, then execute commands until Stop.

All ranks run this loop. Rank 0 takes the next command from the coordinator and broadcasts it; all ranks execute it.
A command of another incarnation is dropped. Commands may be repeated: a step is never applied twice.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rljob.api.extensions import BACKENDS, load
from rljob.api.models import RLJob
from rljob.api.roles import Trainer
from rljob.protocol.checkpoint_copies import CopyError, CopyRefusedError, open_copies
from rljob.protocol.checkpoint_record import TrainerState
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.health_probe import record_ready
from rljob.protocol.initializer_stamp import mark_used
from rljob.protocol.model_cache import ModelUnavailableError, read_model
from rljob.protocol.shared_messages import Reject
from rljob.protocol.trainer_protocol import (
    Checkpoint,
    CheckpointCopied,
    Checkpointed,
    RefuseCheckpoint,
    RefusedCheckpoint,
    RegisterTrainer,
    SendWeights,
    StepDone,
    Stop,
    ToTrainer,
    Train,
    TrainerBlocked,
    TrainerFailed,
    TrainerRegistered,
)
from rljob.trainer import preflight
from rljob.trainer.backends.base import Backend, BackendFactory, PacksRows, SavedState
from rljob.trainer.background_sender import BackgroundSender
from rljob.trainer.batch import Row
from rljob.trainer.batch_plan import BatchPlan
from rljob.trainer.checkpoint import CheckpointStore, read_configuration
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.checkpoint_upload import upload_checkpoint
from rljob.trainer.checkpoint_writer import CheckpointWriter, retry_while_blocked
from rljob.trainer.coordinator_client import Command, CoordinatorClient, Result
from rljob.trainer.errors import ModelError, NewerCheckpointError, NoRoomError, SupersededError, UnrecoverableError
from rljob.trainer.fetch_batch import pull_shard
from rljob.trainer.frozen_models import load_critic, load_models, read_sources
from rljob.trainer.microbatch_budget import microbatch_budget
from rljob.trainer.process_group import World, join_world, leave_world, make_deterministic, set_threads
from rljob.trainer.step import apply_batch, plan_step
from rljob.trainer.step_checks import StepChecks
from rljob.trainer.weight_probe import TOKENS, probe
from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.bucket_wires import wire_buffers
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.snapshot_stream import SnapshotStream
from rljob.transfer.wire_plan import WirePlan

if TYPE_CHECKING:
    from rljob.protocol.s3_checkpoints import S3Checkpoints  # imports s3fs, which takes a second

log = logging.getLogger(__name__)

STOPPED = 0  # exit code
REPORT_SECONDS = 60.0
WRITE, FINISH, NOTHING = b"write", b"finish", b"nothing"  # what is to be done for a Checkpoint command

_commands = frame_decoder(ToTrainer)


def run(environment: ComponentEnvironment) -> int:
    """Run this rank until Stop; return the process's exit code."""
    problems = list(preflight.reference_problems(environment.job.spec))
    for problem in problems:
        log.error("%s", problem)
    if problems:
        return CONFIGURATION_ERROR
    set_threads()
    world = join_world()
    make_deterministic(world.device)
    try:
        _check_device(environment.job.spec.trainer, world.device)
        loop = TrainerLoop(environment, world)
        if world.rank == 0:
            with contextlib.suppress(OSError):  # full disk: the next start marks it
                mark_used(environment.storage)
        return loop.run()
    except (ModelError, CopyRefusedError) as error:
        log.error("%s", error)
        return CONFIGURATION_ERROR
    except (ModelUnavailableError, CopyError, NoRoomError) as error:
        log.error("%s", error)
        return FAILURE
    finally:
        leave_world()


def _check_device(settings: Trainer, device: torch.device) -> None:
    """Refuse to train on the CPU with the settings of a GPU.

    Raises:
        ModelError: the trainer's accelerator is a GPU, and torch finds none.
    """
    if settings.accelerator.kind == "nvidia" and device.type != "cuda":
        raise ModelError(
            f"spec.trainer.accelerator.kind: nvidia, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds "
            "no usable GPU; update the driver, install torch for GPUs, or set cpu"
        )


class TrainerLoop:
    """One rank's loop.

    Args:
        environment: of this process; its job is resolved.
        world: the ranks.

    Raises:
        ModelError: the model, or every checkpoint, cannot be used.
    """

    def __init__(self, environment: ComponentEnvironment, world: World) -> None:
        self._environment = environment
        self._job: RLJob = environment.job
        self._world = world
        self._incarnation = 0
        self._checks = StepChecks.of(environment.job.spec)
        self._checkpoints = CheckpointStore(environment.storage)
        if world.rank == 0:
            self._checkpoints.clean()
        world.raise_first_error(None)  # all ranks wait until rank 0 has cleaned up
        refused = self._load()
        self._plan = self._make_plan()
        if world.rank == 0:
            self._publisher = self._make_publisher()
            self._coordinator = CoordinatorClient(
                environment.coordinator,
                environment.token,
                RegisterTrainer(
                    f"trainer-{secrets.token_hex(4)}", 0, self._step, self._saved.digest if self._saved else "", refused
                ),
                self._publisher.cancel,
            )
        self._writer_world = world.with_own_control()
        self._writer = self._make_writer()

    def run(self) -> int:
        """Execute commands until Stop; return the exit code."""
        record_ready(True)  # marks the pod as ready: its other ranks have loaded too, or all ranks fail
        if self._world.rank == 0:
            self._coordinator.start()
        try:
            return self._execute_until_stop()
        finally:
            self._writer.close()
            if self._world.rank == 0:
                self._coordinator.close()

    def _execute_until_stop(self) -> int:
        while True:
            command = self._next()
            if isinstance(command, Stop):
                log.info("stopping: %s", command.reason)
                return STOPPED
            if isinstance(command, Reject):
                log.error("the coordinator rejects this trainer: %s", command.reason)
                return CONFIGURATION_ERROR
            if isinstance(command, RefuseCheckpoint) and command.incarnation == self._incarnation:
                return self._refuse(command)
            try:
                self._execute(command)
            except UnrecoverableError as error:
                return self._fail(str(error))
            except NewerCheckpointError as error:
                log.error("%s; starting again", error)
                return FAILURE
            except SupersededError as error:
                log.warning("%s; waiting for the next command", error)

    def _next(self) -> Command:
        frame = encode_frame([self._coordinator.next()]) if self._world.rank == 0 else None
        command: Command = _commands.decode(self._world.broadcast(frame))[0]
        return command

    def _execute(self, command: TrainerRegistered | Train | SendWeights | Checkpoint | RefuseCheckpoint) -> None:
        if isinstance(command, TrainerRegistered):
            self._registered(command)
        elif command.incarnation != self._incarnation:
            log.warning(
                "dropped a command of incarnation %d; this is incarnation %d", command.incarnation, self._incarnation
            )
        elif isinstance(command, Train):
            self._train(command)
        elif isinstance(command, SendWeights):
            self._send_weights(command)
        elif isinstance(command, Checkpoint):
            self._checkpoint(command)

    def _post(self, result: Result) -> None:
        if self._world.rank == 0:
            self._coordinator.post(result)

    def _load(self) -> list[RefusedCheckpoint]:
        """Load the newest checkpoint without damage, else the initial model; return the refused checkpoints."""
        self._copies = self._open_copies()
        chosen = choose_checkpoint(self._checkpoints, self._world, self._copies)
        has_adapters = self._job.spec.trainer.lora is not None  # a checkpoint has merged weights, not those below them
        source = self._read_policy() if chosen.path is None or has_adapters else chosen.path
        log.info("loading %s", source)
        self._saved: TrainerState | None = chosen.state
        """Record of the checkpoint that this process loaded or wrote last; the writer updates it. On ranks other than 0
        a written one has no digests."""
        self._step = chosen.state.step if chosen.state is not None else 0
        others = read_sources(self._environment)
        self._budget = microbatch_budget(self._job.spec, {**others, "policy": source}, self._world)
        factory: BackendFactory = load(BACKENDS, self._job.spec.trainer.backend, "spec.trainer.backend")
        self._backend: Backend = factory(source, self._job.spec.trainer, self._world)
        self._packed = isinstance(self._backend, PacksRows) and self._backend.packs
        if chosen.path is not None:
            self._backend.load(chosen.path)
        self._frozen = load_models(self._job.spec.algorithm, others, source, self._backend)
        self._critic = load_critic(
            self._job.spec.algorithm, self._job.spec.trainer, others, source, self._backend, chosen.path
        )
        self._world = self._backend.world
        self._configuration = read_configuration(source)
        self._last = StepDone(0, self._step - 1, {})
        return chosen.refused

    def _open_copies(self) -> S3Checkpoints | None:
        if self._job.spec.checkpoints.uri is None:
            return None
        run, *_ = self._world.agree(lambda: self._checkpoints.run_id() if self._world.rank == 0 else "")
        return open_copies(self._job.spec, run)

    def _read_policy(self) -> Path:
        """Return the directory of the initial model. The first rank of a machine downloads a remote model."""
        try:
            return read_model(self._environment, "policy")
        except ValueError as error:
            raise ModelError(str(error)) from error

    def _make_publisher(self) -> BackgroundSender:
        settings = self._job.spec.weight_sync
        transport = settings.transport
        self._buffers = wire_buffers(transport, self._world.device)
        self._stream = SnapshotStream(self._world.device)
        sender = WeightSender(self._environment.host, settings.timeout_seconds, transport)
        return BackgroundSender(sender, transport, self._post)

    def _make_plan(self) -> WirePlan:
        """Return the plan of all updates; all ranks take part. It follows from one pass over the tensors, because any
        backend has them."""
        return WirePlan.of(self._gather(), self._job.spec.weight_sync.bucket_bytes, self._backend.dtype)

    def _make_writer(self) -> CheckpointWriter:
        if self._world.rank == 0:
            fail, idle = self._coordinator.fail, self._coordinator.wake
            return CheckpointWriter(self._writer_world, self._report_blocked, fail, idle)
        return CheckpointWriter(self._writer_world, self._report_blocked, _end_process, lambda: None)

    def _registered(self, answer: TrainerRegistered) -> None:
        if answer.incarnation != self._incarnation:
            log.info("incarnation %d at step %d; the run is at step %d", answer.incarnation, self._step, answer.step)
        self._incarnation = answer.incarnation
        problem: UnrecoverableError | NewerCheckpointError | None = None
        if self._world.rank == 0:
            self._publisher.forget()
            try:
                claim = functools.partial(self._checkpoints.claim, answer.incarnation)
                claimed = retry_while_blocked(claim, self._coordinator.wait_obsolete, self._report_blocked)
            except SupersededError as error:
                problem = UnrecoverableError(f"{error}; the storage belongs to another run")
            else:  # without the claim another process may still write one; the next registration asks again
                problem = self._look_for(answer.unseen) if claimed else None
        self._world.raise_first_error(problem)

    def _look_for(self, unseen: list[int]) -> NewerCheckpointError | None:
        """Return an error if one of the checkpoints ``unseen`` exists, else refuse them. An earlier incarnation writes
        no more: this one has claimed the checkpoints."""
        found = [step for step in unseen if self._checkpoints.has(step)]
        if found:
            return NewerCheckpointError(
                f"another process wrote the checkpoint of step {max(found)} after this one had chosen "
                f"{f'that of step {self._step}' if self._step else 'the initial model'}"
            )
        if unseen:
            missing = [(step, f"the trainer did not find {self._checkpoints.relative(step)}") for step in unseen]
            self._coordinator.refuse([RefusedCheckpoint(step, reason) for step, reason in missing])
        return None

    def _train(self, train: Train) -> None:
        if train.step < self._step:
            repeated = self._last if self._last.step == train.step else StepDone(train.incarnation, train.step, {})
            self._post(repeated)
            return
        if train.step > self._step:
            raise UnrecoverableError(f"batch {train.step} cannot be applied to weights of version {self._step}")
        spec, world = self._job.spec, self._world
        started = time.perf_counter()
        plan = plan_step(train, spec.algorithm, world, self._budget, self._packed)
        rows = self._pull(plan)
        pulled = time.perf_counter()
        result = apply_batch(plan, rows, spec.algorithm, self._backend, world, self._checks, self._frozen, self._critic)
        self._step += 1
        seconds = time.perf_counter() - started
        metrics = result.metrics | {
            "seconds_pull": pulled - started,
            "seconds": seconds,
            "tokens_per_second": result.metrics["tokens"] / seconds,
        }
        self._last = StepDone(train.incarnation, train.step, metrics, result.advantages_N.tobytes())
        self._post(self._last)
        if self._world.rank == 0:
            log.info("step %d: %s", train.step, " ".join(f"{name}={value:.4g}" for name, value in metrics.items()))

    def _pull(self, plan: BatchPlan) -> dict[int, Row]:
        """Fetch the rows of this replica; each of its ranks fetches the same shard."""
        problem: UnrecoverableError | SupersededError | None = None
        rows: dict[int, Row] = {}
        try:
            rows = pull_shard(self._environment.coordinator, self._environment.token, plan.train, plan.indices)
        except (UnrecoverableError, SupersededError) as error:
            problem = error
        self._world.raise_first_error(problem)
        return rows

    def _send_weights(self, command: SendWeights) -> None:
        """Begin to send the weights, and gather them: all ranks gather each tensor, rank 0 copies it. The first bucket
        is on the wire while the next one is gathered."""
        length = min(TOKENS, *(rollout.max_model_length - 1 for rollout in self._job.spec.policy_pools))
        known = probe(self._backend, self._world.device, length)
        if self._world.rank != 0:
            deque(self._gather(), maxlen=0)  # keeps no tensor while the next one is gathered
            return
        weights = PackedWeights(self._plan)
        self._publisher.publish(command, weights, known)
        weights.fill(self._gather(), self._buffers, self._stream)

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in the type of the wire; all ranks take part."""
        return self._backend.named_tensors(self._backend.dtype)

    def _checkpoint(self, command: Checkpoint) -> None:
        """Write the checkpoint of a step in the background, and copy it to S3 if the job does. Not if it is written
        already; an existing one is only copied."""
        action = self._world.broadcast(self._checkpoint_action(command) if self._world.rank == 0 else None)
        if action == NOTHING:
            return
        write = self._copy_state(command) if action == WRITE else None

        def attempt() -> None:
            nonlocal write
            if write is not None:
                write()
                write = None  # an attempt that cannot upload leaves it written
            if self._copies is not None:
                upload_checkpoint(
                    self._copies,
                    self._checkpoints,
                    self._writer_world,
                    command.step,
                    command.incarnation,
                    command.remove,
                )

        self._post(CheckpointCopied(command.incarnation, command.step))
        done = functools.partial(self._finish_checkpoint, command) if self._world.rank == 0 else lambda: None
        self._writer.start(command.step, attempt, done)

    def _copy_state(self, command: Checkpoint) -> Callable[[], None]:
        """Copy this rank's part of the weights and of the optimizer; return the function that writes the copy."""
        started = time.monotonic()
        saved = self._backend.save()
        if self._critic is not None:
            saved = replace(saved, optimizer=saved.optimizer | self._critic.save())
        seconds, size = time.monotonic() - started, _bytes_of(saved) / 1e9
        log.info("this rank's %.3f GB of the checkpoint of step %d were copied in %.2f s", size, self._step, seconds)
        versions = {name: version(name) for name in ("rljob-trainer", "torch", "transformers")}
        state = TrainerState(self._step, self._backend.updates, command.incarnation, versions, {})

        def write() -> None:
            self._checkpoints.write(self._writer_world, state, self._configuration, saved)
            self._saved = state

        return write

    def _checkpoint_action(self, command: Checkpoint) -> bytes:
        """Return whether the checkpoint of a command must be written, or exists, or nothing is left to do."""
        if self._writer.step == command.step:  # a repeated command
            self._coordinator.post(CheckpointCopied(command.incarnation, command.step))
            return NOTHING
        if self._coordinator.wait_obsolete(unless=lambda: self._writer.step is None):
            return NOTHING
        if self._saved is not None and self._saved.step == command.step and self._checkpoints.has(command.step):
            return FINISH
        if command.step != self._step:
            log.warning("there is no checkpoint of step %d; the weights are of step %d", command.step, self._step)
            return NOTHING
        return WRITE

    def _finish_checkpoint(self, command: Checkpoint) -> None:
        """Remove old checkpoints, then answer: if the trainer dies in between, the command is repeated."""
        assert self._saved is not None, "the checkpoint has been loaded or written"
        self._checkpoints.remove(command.remove, command.incarnation)
        path = self._checkpoints.relative(command.step)
        self._coordinator.post(Checkpointed(command.incarnation, command.step, path, self._saved.digest))

    def _refuse(self, command: RefuseCheckpoint) -> int:
        """Set aside the checkpoint that this process loaded; return the exit code, after which the next one starts."""
        if self._world.rank == 0:
            log.error("the checkpoint of step %d is refused: %s", command.step, command.reason)
            with contextlib.suppress(SupersededError):  # the successor decides itself
                if self._copies is not None:
                    self._copies.remove([command.step], self._checkpoints.exclusive(command.incarnation))
                log.error("it is kept as %s", self._checkpoints.refuse(command.step, command.incarnation))
        self._world.raise_first_error(None)  # all ranks wait for rank 0: the first exit ends the others
        return FAILURE

    def _report_blocked(self, reason: str) -> None:
        self._post(TrainerBlocked(self._incarnation, reason))

    def _fail(self, reason: str) -> int:
        """Report the reason and wait for Stop, so that the coordinator receives the reason before the process exits."""
        log.error("the trainer cannot continue: %s", reason)
        if self._world.rank == 0:
            self._coordinator.post(TrainerFailed(self._incarnation, reason))
            deadline = time.monotonic() + REPORT_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                if isinstance(self._coordinator.next(left), Stop | Reject):
                    break
        self._world.raise_first_error(None)
        return CONFIGURATION_ERROR


def _bytes_of(saved: SavedState) -> int:
    return sum(tensor.nbytes for tensors in (saved.weights, saved.optimizer) for tensor in tensors.values())


def _end_process(error: BaseException) -> None:
    """End a rank whose writer failed. Its main thread may wait for the next command, where nothing can raise."""
    os._exit(FAILURE)
