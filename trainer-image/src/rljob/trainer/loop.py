"""The trainer's main loop: load, register, then execute commands until Stop.

All ranks run this loop. Rank 0 takes the next command from the coordinator and broadcasts it; all ranks execute it.
A command of another incarnation is dropped. Commands may be repeated: a step is never applied twice.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from importlib.metadata import version

import torch

from rljob.api.extensions import BACKENDS, load
from rljob.api.models import RLJob
from rljob.protocol.checkpoint_record import TrainerState
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE
from rljob.protocol.health_probe import record_ready
from rljob.protocol.initializer_stamp import mark_used
from rljob.protocol.messages import (
    Checkpoint,
    Checkpointed,
    RefuseCheckpoint,
    RefusedCheckpoint,
    RegisterTrainer,
    Reject,
    SendWeights,
    StepDone,
    Stop,
    ToTrainer,
    Train,
    TrainerBlocked,
    TrainerFailed,
    TrainerRegistered,
    encode_frame,
    frame_decoder,
)
from rljob.trainer import preflight
from rljob.trainer.backends.base import Backend, BackendFactory
from rljob.trainer.background_sender import BackgroundSender
from rljob.trainer.batch import Row
from rljob.trainer.checkpoint import CheckpointStore, read_configuration
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.coordinator_client import Command, CoordinatorClient, Result
from rljob.trainer.errors import ModelError, NoRoomError, SupersededError, UnrecoverableError
from rljob.trainer.fetch_batch import pull_shard
from rljob.trainer.process_group import World, join_world, leave_world, make_deterministic, set_threads
from rljob.trainer.step import apply_batch
from rljob.trainer.weight_probe import TOKENS, probe
from rljob.trainer.weight_sender import WeightSender

log = logging.getLogger(__name__)

STOPPED = 0  # exit code
REPORT_SECONDS = 60.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0  # between attempts to write to a full disk

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
        loop = TrainerLoop(environment, world)
        if world.rank == 0:
            with contextlib.suppress(OSError):  # full disk: the next start marks it
                mark_used(environment.storage)
        return loop.run()
    except ModelError as error:
        log.error("%s", error)
        return CONFIGURATION_ERROR
    finally:
        leave_world()


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
        self._checkpoints = CheckpointStore(environment.storage)
        if world.rank == 0:
            self._checkpoints.clean()
        world.raise_first_error(None)  # all ranks wait until rank 0 has cleaned up
        refused = self._load()
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

    def run(self) -> int:
        """Execute commands until Stop; return the exit code."""
        record_ready(True)  # marks the pod as ready: its other ranks have loaded too, or all ranks fail
        if self._world.rank != 0:
            return self._execute_until_stop()
        self._coordinator.start()
        try:
            return self._execute_until_stop()
        finally:
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
        chosen = choose_checkpoint(self._checkpoints, self._world)
        policy = next(model for model in self._job.spec.models if model.name == "policy")
        source = self._environment.path(policy.source) if chosen.path is None else chosen.path
        log.info("loading %s", source)
        self._saved: TrainerState | None = chosen.state
        """Record of the checkpoint that this process loaded or wrote last; only rank 0 updates it."""
        self._step = chosen.state.step if chosen.state is not None else 0
        factory: BackendFactory = load(BACKENDS, self._job.spec.trainer.backend, "spec.trainer.backend")
        self._backend: Backend = factory(source, self._job.spec.trainer, self._world)
        if chosen.path is not None:
            self._backend.load(chosen.path)
        self._world = self._backend.world
        self._configuration = read_configuration(source)
        self._last = StepDone(0, self._step - 1, {})
        return chosen.refused

    def _make_publisher(self) -> BackgroundSender:
        settings = self._job.spec.weight_sync
        transport = settings.transport
        if transport == "auto":
            transport = "nccl" if self._world.device.type == "cuda" else "gloo"
        self._wire_device = self._world.device if transport == "nccl" else torch.device("cpu")
        sender = WeightSender(self._environment.host, settings.bucket_bytes, settings.timeout_seconds, transport)
        return BackgroundSender(sender, transport, self._post)

    def _registered(self, answer: TrainerRegistered) -> None:
        if answer.incarnation != self._incarnation:
            log.info("incarnation %d at step %d; the run is at step %d", answer.incarnation, self._step, answer.step)
        self._incarnation = answer.incarnation
        problem = None
        if self._world.rank == 0:
            self._publisher.forget()
            try:
                self._write(lambda: self._checkpoints.claim(answer.incarnation))
            except SupersededError as error:
                problem = UnrecoverableError(f"{error}; the storage belongs to another run")
        self._world.raise_first_error(problem)

    def _train(self, train: Train) -> None:
        if train.step < self._step:
            repeated = self._last if self._last.step == train.step else StepDone(train.incarnation, train.step, {})
            self._post(repeated)
            return
        if train.step > self._step:
            raise UnrecoverableError(f"batch {train.step} cannot be applied to weights of version {self._step}")
        started = time.perf_counter()
        rows = self._pull(train)
        pulled = time.perf_counter()
        spec = self._job.spec
        result = apply_batch(train, rows, spec.algorithm, self._backend, self._world, spec.trainer.microbatch_tokens)
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

    def _pull(self, train: Train) -> dict[int, Row]:
        """Fetch the rows of this replica; each of its ranks fetches the same shard."""
        problem: UnrecoverableError | SupersededError | None = None
        rows: dict[int, Row] = {}
        try:
            rows = pull_shard(
                self._environment.coordinator, self._environment.token, train, self._world.dp_rank, self._world.dp_size
            )
        except (UnrecoverableError, SupersededError) as error:
            problem = error
        self._world.raise_first_error(problem)
        return rows

    def _send_weights(self, command: SendWeights) -> None:
        spec = self._job.spec
        length = min(TOKENS, *(rollout.max_model_length - 1 for rollout in spec.rollouts))
        known = probe(self._backend, self._world.device, length)
        weights = []
        for name, tensor in self._backend.named_tensors():
            if self._world.rank == 0:
                weights.append((name, tensor.to(self._wire_device, self._backend.dtype, copy=True)))
        if self._world.rank == 0:
            self._publisher.publish(command, weights, known)

    def _checkpoint(self, command: Checkpoint) -> None:
        if command.step == self._step:
            self._write_checkpoint(command.incarnation)
        if self._world.rank != 0:
            return
        if self._saved is not None and self._saved.step == command.step:
            # Before the answer: if the trainer dies here, the command is repeated.
            self._checkpoints.remove(command.remove)
            path = self._checkpoints.relative(command.step)
            self._coordinator.post(Checkpointed(command.incarnation, command.step, path, self._saved.digest))
        else:
            log.warning("there is no checkpoint of step %d; the weights are of step %d", command.step, self._step)

    def _write_checkpoint(self, incarnation: int) -> None:
        """Write the checkpoint of the current step, unless this process has loaded or written it."""
        saved = self._backend.save()
        known = self._saved is not None and self._saved.step == self._step and self._checkpoints.has(self._step)
        if known or self._world.rank != 0:
            return
        versions = {name: version(name) for name in ("rljob-trainer", "torch", "transformers")}
        state = TrainerState(self._step, self._backend.updates, incarnation, versions, {})

        def attempt() -> None:
            self._checkpoints.write(state, self._configuration, saved.weights, saved.optimizer)
            self._saved = state

        self._write(attempt)

    def _refuse(self, command: RefuseCheckpoint) -> int:
        """Set aside the checkpoint that this process loaded; return the exit code, after which the next one starts."""
        if self._world.rank == 0:
            log.error("the checkpoint of step %d is refused: %s", command.step, command.reason)
            with contextlib.suppress(SupersededError):  # the successor decides itself
                log.error("it is kept as %s", self._checkpoints.refuse(command.step, command.incarnation))
        self._world.raise_first_error(None)  # all ranks wait for rank 0: the first exit ends the others
        return FAILURE

    def _write(self, attempt: Callable[[], None]) -> None:
        """Write to the disk; while it is full, retry until the command is obsolete."""
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                attempt()
                break
            except NoRoomError as error:
                log.error("%s; the next attempt is in %.0f s", error, pause)
                self._coordinator.post(TrainerBlocked(self._incarnation, str(error)))
            if self._coordinator.wait_obsolete(pause):
                return
            pause = min(2 * pause, LAST_RETRY_SECONDS)
        if pause > FIRST_RETRY_SECONDS:
            self._coordinator.post(TrainerBlocked(self._incarnation, ""))

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
