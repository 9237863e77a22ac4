"""Control of the trainer: its commands, replay after a restart, steps and checkpoints.

The trainer has one command at a time, derived by :meth:`TrainerController._next_command` from current state, not from
message history, so a reconnecting trainer or a restarted coordinator just continues with the next command. Every
trainer process has an incarnation; messages of lower ones are rejected. A new process starts from its
checkpoint, receives the recorded batches again, and publishes nothing until it reproduces the published digest or a new
lineage starts (see :mod:`rljob.coordinator.weight_publisher`). A checkpoint that is not what the ledger records is
refused: the trainer starts again from the one before it. A process that loaded while the previous one wrote a newer
checkpoint ends, and the next one starts from that.
"""

from __future__ import annotations

import logging
import math
from typing import Literal, NamedTuple, Protocol

from rljob.api.models import RLJobSpec
from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord
from rljob.coordinator.kept_checkpoints import KeptCheckpoints
from rljob.coordinator.weight_publisher import TrainerSession, WeightPublisher
from rljob.ledger.queries import TrainerRecord
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import trainer_protocol as m
from rljob.protocol.checkpoint_files import is_inside

log = logging.getLogger(__name__)


class TrainerRun(Protocol):
    """The part of the run that the controller uses."""

    @property
    def version(self) -> int:
        """Trainer version of the run: batches applied."""

    @property
    def suspending(self) -> bool:
        """Whether the run stops as soon as the trainer's steps are durable."""

    @property
    def must_hold_version(self) -> bool:
        """Whether the trainer must stay at its version for now."""

    def is_formed(self, step: int) -> bool:
        """Whether the batch of ``step`` is formed and not applied."""

    def recorded_batch(self, step: int) -> m.Train | None:
        """Return the batch of ``step`` from the ledger; None while it is not durable."""

    def applied(self, step: int, metrics: dict[str, float]) -> None:
        """Handle the first application of the batch of the current version."""

    def warn(self, message: str) -> None:
        """Record a sentence that readers of the run must see."""

    def fail(self, reason: str, message: str) -> None:
        """Fail the run."""

    def changed(self) -> None:
        """Schedule the evaluation of the next steps after a change of state."""


class TrainerCommand(NamedTuple):
    """A command for the trainer. ``step``: of the batch or the checkpoint. ``engines``: receivers of the weights;
    without engines the trainer only reports its digest."""

    kind: Literal["train", "send_weights", "checkpoint"]
    step: int
    engines: tuple[EngineRecord, ...] = ()


class TrainerController:
    """The trainer of one run."""

    def __init__(
        self, spec: RLJobSpec, ledger: LedgerWriter, session: TrainerSession, weights: WeightPublisher, run: TrainerRun
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._weights = weights
        self._run = run
        self.session = session
        self.checkpoints = KeptCheckpoints(spec.checkpoints.keep, ledger)
        self._training = -1  # step of its last Train command
        self._resumes = False  # it reconnected and may still compute the batch of its step

    def restore(self, record: TrainerRecord) -> None:
        """Restore incarnation and checkpoints from the ledger."""
        self.session.incarnation, self.session.start = record.incarnation, record.start
        self.checkpoints.restore(record)

    # --- registration and loss of the trainer ---

    def register(self, connection: Connection, message: m.RegisterTrainer) -> None:
        """Register a trainer process, or register it again."""
        session, version = self.session, self._run.version
        if message.incarnation not in (0, session.incarnation):
            connection.reject(f"incarnation {message.incarnation} was superseded by {session.incarnation}", fatal=True)
            return
        new_process = message.incarnation == 0
        has_just_loaded = new_process or message.step == session.start
        allowed = version + (1 if message.incarnation else 0)
        can_refuse = has_just_loaded and self.checkpoints.before(message.step) is not None
        if message.step > max(allowed, self.checkpoints.newest) and not can_refuse:
            connection.reject(
                f"the trainer holds version {message.step}, but the ledger ends at {version}: checkpoints "
                "and ledger are not of the same run; remove one of them, or choose another run directory",
                fatal=True,
            )
            return
        unseen = self.checkpoints.unseen(message) if has_just_loaded else []
        if has_just_loaded and not unseen and (obstacle := self.checkpoints.obstacle(message.step)):
            connection.reject(obstacle, fatal=True)
            return
        if session.connection is not None and session.connection is not connection:
            session.connection.send(m.Stop("another trainer process replaced this one"))
            session.connection.close()
        session.connection, session.busy, session.blocked, session.step = connection, "", "", message.step
        if new_process:
            session.writing = None
        session.digest = message.digest
        if new_process:
            session.incarnation += 1
            session.start = message.step
            self._ledger.record_incarnation(session.incarnation, connection.instance, message.step)
            log.info(
                "trainer %s is incarnation %d, from version %d", connection.instance, session.incarnation, message.step
            )
        self._weights.trainer_registered(new_process)
        # the batch of its step was never sent to a process that must verify its weights first
        self._resumes = not new_process and not self._weights.must_verify and self._run.is_formed(message.step)
        registered = m.TrainerRegistered(session.incarnation, version, unseen)
        self._ledger.then(connection.send, registered)
        if unseen:
            session.busy = "TrainerRegistered"  # no command before the process has looked for them
        elif has_just_loaded:
            self._refuse_newer(message)
            if mismatch := self.checkpoints.mismatch(message, version):
                self.refuse_start(mismatch)  # also of a process that lost its connection before the message
        self._run.changed()

    def _refuse_newer(self, message: m.RegisterTrainer) -> None:
        """Refuse the checkpoints that a process found damaged or missing, and that are newer than its own."""
        for refused in sorted(message.refused, key=lambda refused: refused.step):
            if refused.step <= message.step:
                continue
            self.checkpoints.refuse(refused.step, "")  # a disk that could not be read may be readable later
            self._run.warn(
                f"the checkpoint of step {refused.step} was refused: {refused.reason}; the trainer continues from "
                f"{self._name(message.step)}"
            )

    def refuse_start(self, reason: str) -> None:
        """Refuse the weights that a new trainer process started from: they are not what the run published or recorded.
        The process ends; the next one starts from the checkpoint before."""
        session, trainer = self.session, self.session.connection
        assert trainer is not None, "a trainer that is being registered or has just answered is connected"
        session.busy = "RefuseCheckpoint"  # no other command follows
        previous = self.checkpoints.before(session.start)
        if previous is None and not self.checkpoints.obstacle(0):  # all batches since version 0 are stored
            previous = 0
        if session.start == 0:
            trainer.reject(
                f"the initial model (spec.models, policy) is not the one that this run began with: {reason}; restore "
                "it, or start another run",
                fatal=True,
            )
        elif previous is None:
            trainer.reject(
                f"no checkpoint can be used: that of step {session.start} is refused ({reason}) and there is none "
                "before it; restore it from a copy, or start another run",
                fatal=True,
            )
        else:
            self.checkpoints.refuse(session.start, session.digest)
            self._run.warn(
                f"the checkpoint of step {session.start} was refused: {reason}; the trainer continues from "
                f"{self._name(previous)}"
            )
            refuse = m.RefuseCheckpoint(session.incarnation, session.start, reason)
            self._ledger.then(trainer.send, refuse)

    @staticmethod
    def _name(step: int) -> str:
        return f"the checkpoint of step {step}" if step else "the initial model"

    def lose(self, connection: Connection) -> None:
        """Handle the loss of the trainer's connection."""
        session = self.session
        if session.connection is connection:
            session.connection, session.busy, session.blocked = None, "", ""
            self._weights.trainer_lost()

    def accepts(self, connection: Connection, incarnation: int) -> bool:
        """Return whether a message comes from the current trainer process; otherwise reject it."""
        if connection is self.session.connection and incarnation == self.session.incarnation:
            return True
        connection.reject(
            f"incarnation {incarnation} is not the current one", fatal=incarnation != self.session.incarnation
        )
        return False

    # --- the core decision ---

    def advance(self) -> None:
        """Send the trainer its next command, if it has none and one is due."""
        command = self._next_command()
        trainer = self.session.connection
        if command is None or trainer is None:
            return
        message = self._message(command)
        if message is not None:
            self.session.busy = type(message).__name__
            self._training = command.step if command.kind == "train" else self._training
            self._ledger.then(trainer.send, message)

    @property
    def awaits_new_batch(self) -> bool:
        """Whether the trainer is free for the batch of its version and that batch is not formed yet."""
        version = self._run.version
        if self.session.busy or self._run.is_formed(version):
            return False
        command = self._next_command()
        return command is not None and command.kind == "train" and command.step == version

    def _next_command(self) -> TrainerCommand | None:
        """Derive the next command from current state: replay, verify, publish, checkpoint, train."""
        session, version = self.session, self._run.version
        if session.connection is None or session.busy:
            return None
        if session.step > version:
            return TrainerCommand("train", version)  # it applied the batch, its StepDone was lost: it answers again
        if self._run.suspending:
            if self.is_quiescent or session.writing == version:
                return None
            if self._resumes:  # the computation cannot be interrupted, so the batch is kept
                return TrainerCommand("train", version)
            if self._weights.must_verify:  # before a checkpoint: it must hold what was published
                return TrainerCommand("send_weights", version)
            return TrainerCommand("checkpoint", version)
        if self._weights.must_verify:
            return TrainerCommand("send_weights", version)
        if self._loaded_unrecorded():
            return TrainerCommand("checkpoint", session.step)
        if session.step < version:
            return TrainerCommand("train", session.step)
        if self._resumes:
            return TrainerCommand("train", version)
        if outdated := self._weights.outdated_engines():
            return TrainerCommand("send_weights", version, tuple(outdated))
        if self._checkpoint_due(version):
            return TrainerCommand("checkpoint", version)
        if self._run.must_hold_version:
            return None  # so that it can send this version to a restarted engine
        return TrainerCommand("train", version)

    def _loaded_unrecorded(self) -> bool:
        """Return whether the trainer started from a checkpoint that the ledger does not have: the process that wrote it
        died before it could report it."""
        step = self.session.step
        is_at_start = step == self.session.start and not self._resumes
        return is_at_start and step > 0 and step not in self.checkpoints and step != self.session.writing

    def _message(self, command: TrainerCommand) -> m.Train | m.SendWeights | m.Checkpoint | None:
        """Return the message of a command; None while the batch to train on is not durable."""
        match command.kind:
            case "train":
                self._resumes = False
                return self._run.recorded_batch(command.step)
            case "send_weights":
                return self._weights.begin_update(list(command.engines))
            case "checkpoint":
                removed = self.checkpoints.removed_by(command.step, self.session.writing)
                return m.Checkpoint(self.session.incarnation, command.step, removed)

    @property
    def is_quiescent(self) -> bool:
        """Whether ledger and checkpoints contain all of the trainer's work, so that no work is lost if it exits."""
        session, version = self.session, self._run.version
        if session.connection is None or session.step < version:
            return True  # the steps after its checkpoint are replayed
        saved = version == 0 or version in self.checkpoints
        return saved and session.step == version and session.busy not in ("Train", "Checkpoint")

    @property
    def is_idle(self) -> bool:
        """Whether the trainer holds the newest version and is not computing the next one."""
        session = self.session
        connected = session.connection is not None and session.step == self._run.version
        return connected and session.busy != "Train" and not self._resumes

    # --- steps and checkpoints ---

    def step_done(self, message: m.StepDone) -> None:
        """Handle an applied batch, also a replayed one."""
        session = self.session
        if session.busy == "Train" and message.step == self._training:
            session.busy = ""
        if message.step >= session.step:  # not a repeated message
            self._resumes = False
        metrics = {name: value for name, value in message.metrics.items() if math.isfinite(value)}  # JSON has no others
        if message.step == self._run.version:
            self._run.applied(message.step, metrics)
        if metrics.get("updates_skipped"):
            self._run.warn(
                "an optimizer update was skipped because its gradient was not finite; see metric updates_skipped"
            )
        self._ledger.record_applied(message.step, session.incarnation, metrics)
        self._ledger.record_advantages(message.step, message.advantages)
        session.step = max(session.step, message.step + 1)
        self._run.changed()

    def _checkpoint_due(self, version: int) -> bool:
        if version == 0 or version in self.checkpoints or version == self.session.writing:
            return False
        return version % self._spec.checkpoints.every_steps == 0 or version >= self._spec.training.steps

    def blocked(self, message: m.TrainerBlocked) -> None:
        """Record why the trainer cannot continue without a user's help; an empty reason: it continues."""
        if message.reason:
            log.warning("the trainer waits: %s", message.reason)
        self.session.blocked = message.reason

    def checkpoint_copied(self, message: m.CheckpointCopied) -> None:
        """Give the trainer its next command while it writes a checkpoint."""
        if self.session.busy == "Checkpoint" and message.step == self.session.step:
            self.session.busy, self.session.writing = "", message.step
            self._run.changed()

    def checkpointed(self, message: m.Checkpointed) -> None:
        """Record a durable checkpoint, and remove old checkpoints and the payload that they cover."""
        if self.session.busy == "Checkpoint" and message.step == self.session.step:
            self.session.busy = ""
        if self.session.writing == message.step:
            self.session.writing = None
        if message.step in self.checkpoints or message.step > self._run.version:
            return
        if not is_inside(message.path):
            log.error("ignoring a checkpoint that the trainer reports outside the storage: %r", message.path)
            return
        self.checkpoints.add(message)
        self._run.changed()

    def stop(self, reason: str) -> None:
        """Stop the trainer at the end of the run."""
        trainer = self.session.connection
        if trainer is not None:
            self._ledger.then(trainer.send, m.Stop(reason))
