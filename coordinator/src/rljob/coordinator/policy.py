"""The trainer and the versions it makes: commands, replay after a restart, publication to engines, checkpoints.

The trainer has one command at a time, chosen by :meth:`Policy._next_command` from what is, not from what was said, so
that a trainer or coordinator that comes back is simply told what is next. Every trainer process has an incarnation;
messages of lower ones are refused. A new process begins at its checkpoint, is served the recorded batches again, and
publishes nothing until it has shown the digest that was published before, or a new lineage begins.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from rljob.api.models import RLJobSpec
from rljob.coordinator.engines import FAILURES_BEFORE_RESTART, Engine, Engines
from rljob.coordinator.peers import Peer
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import messages as m

log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Agent and trainer end an update by themselves at weightSync.timeoutSeconds; so much later they must have said so."""


MOST_FAILURES_IN_A_ROW = 12
"""Failed updates, of any engine, without a good one between, after which the run ends: restarting does not help."""


class RunView(Protocol):
    """What the policy asks of the run."""

    @property
    def version(self) -> int:
        """Trainer version of the run: batches applied."""

    @property
    def suspending(self) -> bool:
        """Whether the run is to stop once what the trainer has done is durable."""

    def batch(self, step: int) -> m.Train | None:
        """Return the batch of ``step``, formed now if it is time; None when there is none yet."""

    def formed(self, step: int) -> bool:
        """Whether the batch of ``step`` is formed and not applied."""

    def applied(self, step: int, metrics: dict[str, float]) -> None:
        """The batch of the current version was applied for the first time."""

    @property
    def held(self) -> bool:
        """Whether the trainer must stay at its version for now."""

    def needs(self, engine: Engine) -> bool:
        """Whether an engine is to be given the trainer's version."""

    def new_lineage(self) -> None:
        """What engines hold is of another lineage than the trainer from now on."""

    def fail(self, reason: str, message: str) -> None:
        """End the run."""

    def changed(self) -> None:
        """Something happened that may allow a next step."""


@dataclass
class Update:
    """A SendWeights under way: what is sent, and which engines (empty name: nobody, the digest alone) it has not been
    announced to, and has not ended for. The trainer sends from a copy, so it is free once all are announced."""

    lineage: int
    version: int
    unannounced: set[str]
    unended: set[str]

    def end(self, engine: str) -> bool:
        """Sending to ``engine`` ended; return False when it had before."""
        if engine not in self.unended:
            return False
        self.unended.discard(engine)
        self.unannounced.discard(engine)
        return True


class Policy:
    """Trainer, lineage and publications of one run."""

    def __init__(self, spec: RLJobSpec, ledger: LedgerWriter, engines: Engines, run: RunView) -> None:
        self._spec = spec
        self._ledger = ledger
        self._engines = engines
        self._run = run
        self.trainer: Peer | None = None
        self.incarnation = 0
        self.step = 0  # version of the weights the trainer holds
        self.busy = ""  # the command under way
        self.waits = ""  # what the trainer needs somebody to do before it can go on
        self.lineage = 0
        self.published = -1
        self.digests: dict[tuple[int, int], str] = {}
        self.checkpoints: list[int] = []
        self.checkpoint_path = ""
        self._verified = True
        self._resumes = False  # it came back, and may be in the middle of the batch of its step
        self._last_update = 0
        self._updates: dict[int, Update] = {}
        self._failures_in_a_row = 0  # of updates, over all engines
        self.seconds_in_updates = 0.0

    # --- the trainer comes and goes ---

    def register(self, peer: Peer, message: m.RegisterTrainer) -> None:
        """A trainer process (again) connects."""
        if message.incarnation not in (0, self.incarnation):
            peer.refuse(f"incarnation {message.incarnation} was superseded by {self.incarnation}", fatal=True)
            return
        newest = self.checkpoints[-1] if self.checkpoints else 0
        allowed = self._run.version + (1 if message.incarnation else 0)
        if message.step > max(allowed, newest):
            peer.refuse(
                f"the trainer holds version {message.step}, but the ledger ends at {self._run.version}: checkpoints "
                "and ledger are not of the same run; remove one of them or choose another run directory",
                fatal=True,
            )
            return
        if self.trainer is not None and self.trainer is not peer:
            self.trainer.send(m.Stop("another trainer took over"))
            self.trainer.close()
        self.trainer, self.busy, self.waits = peer, "", ""
        self._updates.clear()
        for engine in self._engines.by_instance.values():
            engine.end_update()
            engine.fresh = engine.fresh or message.incarnation == 0
        if message.incarnation == 0:
            self.incarnation += 1
            self._ledger.record_incarnation(self.incarnation, peer.instance, message.step)
            if self.published < 0 or message.step > self.published:
                self._set_verified()  # nothing was published that its weights could differ from
            else:
                self._verified = False
            log.info("trainer %s is incarnation %d, from version %d", peer.instance, self.incarnation, message.step)
        self.step = message.step
        self._resumes = message.incarnation != 0 and self._run.formed(message.step)
        registered = m.TrainerRegistered(self.incarnation, self._run.version)
        self._ledger.then(lambda: peer.send(registered))
        self._run.changed()

    def lose(self, peer: Peer) -> None:
        """The trainer's connection is gone."""
        if self.trainer is peer:
            self.trainer, self.busy, self.waits = None, "", ""
            self._updates.clear()
            for engine in self._engines.by_instance.values():
                engine.fresh = True

    def current(self, peer: Peer, incarnation: int) -> bool:
        """Return whether a message is of the trainer in office; refuse it otherwise."""
        if peer is self.trainer and incarnation == self.incarnation:
            return True
        peer.refuse(f"incarnation {incarnation} is not in office", fatal=incarnation != self.incarnation)
        return False

    # --- the core decision ---

    def advance(self) -> None:
        """Give the trainer its next command if it has none and there is one."""
        if self.trainer is None or self.busy:
            return
        command = self._next_command()
        if command is not None:
            trainer = self.trainer
            self.busy = type(command).__name__
            self._ledger.then(lambda: trainer.send(command))

    def _next_command(self) -> m.Train | m.SendWeights | m.Checkpoint | None:
        """Choose from what is: replay, verify, publish, checkpoint, train."""
        version = self._run.version
        if self.step > version:
            return None  # it did a step while the connection was broken; its StepDone follows
        if self._run.suspending:
            if self.at_rest:
                return None
            if self._resumes:  # it computes that batch and cannot be stopped: it is part of what is kept
                self._resumes = False
                return self._run.batch(version)
            return self._checkpoint(version)
        if not self._verified and self.step == self.published:
            return self._send_weights([])
        if self.step < version:
            return self._run.batch(self.step)
        if self._resumes:
            self._resumes = False
            return self._run.batch(version)
        behind = self._behind()
        if behind:
            return self._send_weights(behind)
        if self._checkpoint_due(version):
            return self._checkpoint(version)
        if self._run.held:
            return None  # so that it can be sent again to an engine that loses it
        return self._run.batch(version)

    @property
    def at_rest(self) -> bool:
        """Whether the ledger and the checkpoints hold all that the trainer did, so that nothing is lost if it ends."""
        version = self._run.version
        if self.trainer is None or self.step < version:
            return True  # what it did after its checkpoint will be, or is being, done again
        saved = version == 0 or version in self.checkpoints
        return saved and self.step == version and self.busy not in ("Train", "Checkpoint")

    @property
    def idle(self) -> bool:
        """Whether the trainer has the newest version and is not about to make another."""
        there = self.trainer is not None and self.step == self._run.version
        return there and self.busy != "Train" and not self._resumes

    def _behind(self) -> list[Engine]:
        """Return engines to be given the trainer's weights."""
        free = [e for e in self._engines.connected() if e.update is None and e.state not in ("starting", "leaving")]
        return [engine for engine in free if self._run.needs(engine)]

    # --- publication ---

    def _send_weights(self, engines: list[Engine]) -> m.SendWeights:
        self._last_update += 1
        patience = self._spec.weight_sync.timeout_seconds + GRACE_SECONDS
        for engine in engines:
            engine.begin_update(self._last_update)
            asyncio.get_running_loop().call_later(patience, self._expire, engine, self._last_update)
        names = {engine.instance for engine in engines} or {""}
        self._updates[self._last_update] = Update(self.lineage, self.step, names, set(names))
        targets = [m.EngineTarget(engine.instance, engine.fresh) for engine in engines]
        return m.SendWeights(self.incarnation, self._last_update, targets)

    def weights_ready(self, message: m.WeightsReady) -> None:
        """The trainer opened a group: tell the engine's agent to join it."""
        update = self._updates.get(message.update)
        if update is None:
            return
        update.unannounced.discard(message.engine)
        self._free_when_announced(update)
        engine = self._engines.by_instance.get(message.engine)
        if engine is None or engine.peer is None or engine.update != message.update:
            self._cancel_send(message.update, message.engine)
            return
        sync = self._spec.weight_sync
        engine.fresh = False
        engine.peer.send(
            m.PrepareWeights(
                update=message.update,
                lineage=update.lineage,
                version=update.version,
                group=message.group,
                address=message.address,
                port=message.port,
                world_size=message.world_size,
                transport=message.transport,
                bucket_bytes=sync.bucket_bytes,
                parameters=message.parameters,
                probe=message.probe,
                in_flight=sync.in_flight,
                timeout_seconds=sync.timeout_seconds,
                engine=engine.instance,
            )
        )

    def weights_sent(self, message: m.WeightsSent) -> None:
        """Sending to one engine ended, or the digest that was asked for is here."""
        update = self._updates.get(message.update)
        if update is None or not update.end(message.engine):
            return
        self._free_when_announced(update)
        if not update.unended:
            del self._updates[message.update]
        if message.engine == "":
            self._verify(message.digest)
        elif message.error:
            self._update_failed(message.engine, message.update, f"trainer: {message.error}")
        else:
            self._publish(update.version, message.digest)
            engine = self._engines.by_instance.get(message.engine)
            if engine is not None and engine.update == message.update:
                engine.sent_digest = message.digest
                self._commit(engine)
        self._run.changed()

    def _free_when_announced(self, update: Update) -> None:
        if not update.unannounced and update is self._updates.get(self._last_update) and self.busy == "SendWeights":
            self.busy = ""
            self._run.changed()

    def _verify(self, digest: str) -> None:
        """A restarted trainer is where it was published last: is it the same policy?"""
        self._set_verified()
        if self.digests.get((self.lineage, self.step)) == digest:
            log.info("the trainer's weights equal what was published as version %d", self.step)
            return
        self.lineage += 1
        log.warning("version %d was not reproduced: lineage %d begins", self.step, self.lineage)
        self._publish(self.step, digest)
        self._run.new_lineage()

    def _set_verified(self) -> None:
        """The trainer in office holds what was published; a coordinator that comes back must know that."""
        self._verified = True
        self._ledger.record_verified(self.incarnation)

    def take_up(self, verified_incarnation: int, starts: int) -> None:
        """Take up a run from its ledger; the rest was set before. Updates are numbered so that an answer to an earlier
        coordinator is never taken for one to this."""
        self._verified = self.published < 0 or verified_incarnation == self.incarnation
        self._last_update = starts << 32

    def _publish(self, version: int, digest: str) -> None:
        """Record what the engines are being given."""
        key = (self.lineage, version)
        if self.digests.setdefault(key, digest) != digest:
            raise RuntimeError(f"version {version} of lineage {self.lineage} was published with two digests")
        self.published = max(self.published, version)
        self._ledger.record_publication(*key, digest, self.incarnation)

    def weight_ack(self, engine: Engine, message: m.WeightAck) -> None:
        """The engine committed an update."""
        if engine.update == message.update:
            engine.ack = message
            self._commit(engine)
            self._run.changed()

    def weight_failed(self, engine: Engine, message: m.WeightFailed) -> None:
        """The engine did not commit an update."""
        self._update_failed(engine.instance, message.update, message.reason)
        self._cancel_send(message.update, engine.instance)
        self._run.changed()

    def _commit(self, engine: Engine) -> None:
        """Once both sides are done: the bytes and the probe must agree, then the engine serves the version."""
        ack, sent = engine.ack, engine.sent_digest
        if ack is None or sent is None:
            return
        if ack.digest != sent:
            self._update_failed(engine.instance, ack.update, f"digest {ack.digest} received, {sent} sent")
            return
        sync = self._spec.weight_sync
        if not ack.probe_error <= sync.probe_tolerance:  # NaN must not pass
            text = (
                f"engine {engine.instance} differs from the trainer by {ack.probe_error:.3g} in the log-probability of "
                f"a probe token at version {ack.version}, more than weightSync.probeTolerance {sync.probe_tolerance:g}"
            )
            if "bfloat16" not in (self._spec.trainer.dtype, self._dtype(engine)):
                self._run.fail("ProbeMismatch", text)
                return
            log.warning("%s", text)
        engine.serving = (ack.lineage, ack.version)
        self._ledger.record_served(engine.instance, ack.lineage, ack.version, ack.digest)
        engine.failures = self._failures_in_a_row = 0
        self.seconds_in_updates += ack.seconds
        engine.end_update()

    def _dtype(self, engine: Engine) -> str:
        return next((pool.dtype for pool in self._spec.rollouts if pool.name == engine.pool), "float32")

    def _update_failed(self, instance: str, update: int, reason: str) -> None:
        engine = self._engines.by_instance.get(instance)
        if engine is None or engine.update != update:
            return
        engine.end_update()
        engine.serving, engine.fresh = None, True
        engine.failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MOST_FAILURES_IN_A_ROW:
            self._run.fail("WeightSyncFails", f"no engine can be given weights any more; the last failure: {reason}")
        log.warning("weights did not reach engine %s: %s", instance, reason)
        if engine.failures >= FAILURES_BEFORE_RESTART and engine.peer is not None:
            engine.failures, engine.state = 0, "starting"
            engine.peer.send(m.RestartEngine(f"{FAILURES_BEFORE_RESTART} updates failed, the last: {reason}"))

    def _expire(self, engine: Engine, update: int) -> None:
        """An agent that is there but never answers must not hold the run."""
        if engine.update == update:
            self._update_failed(engine.instance, update, "its agent did not say how the update ended")
            self._cancel_send(update, engine.instance)
            self._run.changed()

    def lose_engine(self, engine: Engine) -> None:
        """An engine is gone: do not wait for it."""
        if engine.update is not None:
            self._cancel_send(engine.update, engine.instance)
        engine.end_update()

    def _cancel_send(self, update: int, engine: str) -> None:
        under_way = self._updates.get(update)
        if self.trainer is not None and under_way is not None and engine in under_way.unended:
            self.trainer.send(m.CancelSend(self.incarnation, update, engine))

    # --- steps and checkpoints ---

    def step_done(self, message: m.StepDone) -> None:
        """The trainer applied a batch, for the first time or again."""
        if self.busy == "Train" and message.step == self.step:
            self.busy = ""
        if message.step >= self.step:  # not one that is only repeated
            self._resumes = False
        self._applied(
            message.step, {name: x for name, x in message.metrics.items() if math.isfinite(x)}
        )  # JSON has none
        self._ledger.record_advantages(message.step, message.advantages)
        self.step = max(self.step, message.step + 1)
        self._run.changed()

    def _applied(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._run.version:
            self._run.applied(step, metrics)
        self._ledger.record_applied(step, self.incarnation, metrics)

    def _checkpoint_due(self, version: int) -> bool:
        if version == 0 or version in self.checkpoints:
            return False
        return version % self._spec.checkpoints.every_steps == 0 or version >= self._spec.training.steps

    def _checkpoint(self, version: int) -> m.Checkpoint:
        keep = self._spec.checkpoints.keep
        return m.Checkpoint(self.incarnation, version, self.checkpoints[: max(0, len(self.checkpoints) + 1 - keep)])

    def trainer_waits(self, message: m.TrainerWaits) -> None:
        """The trainer cannot go on until somebody helps, or can again."""
        if message.reason:
            log.warning("the trainer waits: %s", message.reason)
        self.waits = message.reason

    def checkpointed(self, message: m.Checkpointed) -> None:
        """A checkpoint is durable; old ones and the payload before them may go."""
        if self.busy == "Checkpoint":
            self.busy = ""
        if message.step in self.checkpoints or message.step > self._run.version:
            return
        if not is_inside(message.path):
            log.error("the trainer names a checkpoint outside the storage, which is none: %r", message.path)
            return
        self.checkpoints = sorted([*self.checkpoints, message.step])
        keep = self._spec.checkpoints.keep
        removed, self.checkpoints = self.checkpoints[:-keep], self.checkpoints[-keep:]
        self.checkpoint_path = message.path
        self._ledger.record_checkpoint(message.step, message.path, self.incarnation, removed)
        oldest = self.checkpoints[0]
        self._ledger.then(lambda: self._ledger.remove_covered_payload(oldest))
        self._run.changed()

    def stop(self, reason: str) -> None:
        """The run is over."""
        if self.trainer is not None:
            trainer = self.trainer
            self._ledger.then(lambda: trainer.send(m.Stop(reason)))


def is_inside(path: str) -> bool:
    """Return whether a path that another part names is one below the storage."""
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts
