"""Publication of the trainer's weights to engines: updates, acknowledgements, digests, lineages.

The trainer sends weights to one or more engines in one update, and is free again once it has announced every engine. An
engine serves a version once both sides report the same digest and the log-probabilities of the probe agree.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from rljob.api.models import RLJobSpec
from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import FAILURES_BEFORE_RESTART, EngineRecord, Engines
from rljob.ledger.queries import TrainerRecord
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import messages as m

log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Agent and trainer end an update themselves after weightSync.timeoutSeconds, and must report that within this
additional time."""
MAX_FAILURES_IN_A_ROW = 12
"""Consecutive failed updates, over all engines, after which the run fails: restarts do not help."""


@dataclass(eq=False)
class TrainerSession:
    """The trainer process and its current command."""

    connection: Connection | None = None
    incarnation: int = 0
    start: int = 0  # version of the weights that the process started from
    digest: str = ""  # of the record of the checkpoint that it started from
    step: int = 0  # version of the weights the trainer holds
    busy: str = ""  # the running command
    blocked: str = ""  # why the trainer cannot continue without a user's help


class PublisherRun(Protocol):
    """The part of the run that the publisher uses."""

    def needs_weights(self, engine: EngineRecord) -> bool:
        """Whether an engine must receive the trainer's version."""

    def start_new_lineage(self) -> None:
        """Handle the start of a new lineage: the weights of all engines belong to the previous one."""

    def refuse_start(self, reason: str) -> None:
        """Handle weights that differ from the published ones although the trainer has just loaded them."""

    def warn(self, message: str) -> None:
        """Record a sentence that readers of the run must see."""

    def fail(self, reason: str, message: str) -> None:
        """Fail the run."""

    def changed(self) -> None:
        """Schedule the evaluation of the next steps after a change of state."""


@dataclass
class WeightUpdate:
    """A running SendWeights command: the version, the engines not yet announced, and the engines not yet finished. The
    engine name "" stands for no engine: the trainer only computes the digest. The trainer sends from a copy, so it is
    free once all engines are announced."""

    lineage: int
    version: int
    unannounced: set[str]
    unfinished: set[str]

    def end(self, engine: str) -> bool:
        """Record that sending to ``engine`` ended; return False if that is already recorded."""
        if engine not in self.unfinished:
            return False
        self.unfinished.discard(engine)
        self.unannounced.discard(engine)
        return True


class WeightPublisher:
    """Lineage, publications and weight updates of one run."""

    def __init__(
        self, spec: RLJobSpec, ledger: LedgerWriter, engines: Engines, session: TrainerSession, run: PublisherRun
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._engines = engines
        self._session = session
        self._run = run
        self.lineage = 0
        self.published = -1
        self.digests: dict[tuple[int, int], str] = {}
        self.seconds_in_updates = 0.0
        self._to_verify: set[int] = set()  # versions at which the trainer's digest is compared with the published one
        self._last_update = 0
        self._updates: dict[int, WeightUpdate] = {}
        self._failures_in_a_row = 0  # updates, over all engines

    def restore(self, record: TrainerRecord) -> None:
        """Restore the publications from the ledger. The update numbers of each coordinator process are distinct, so
        that a reply to an earlier process is never mistaken for a reply to this one."""
        for lineage, version, digest in record.publications:
            self.digests[lineage, version] = digest
            self.lineage = max(self.lineage, lineage)
            self.published = max(self.published, version)
        if record.verified_incarnation != record.incarnation:
            self._to_verify = self._published_versions(record.start)
        self._last_update = (record.starts + 1) << 32

    # --- registration and loss of the trainer ---

    def trainer_registered(self, new_process: bool) -> None:
        """Handle a registered trainer: its earlier updates ended. A new process opens new weight groups, and must show
        that its weights equal the published ones: those that it loaded, and those after the replay."""
        self._updates.clear()
        for engine in self._engines.by_instance.values():
            engine.end_update()
            engine.fresh = engine.fresh or new_process
        if not new_process:
            return
        self._to_verify = self._published_versions(self._session.start)
        if not self._to_verify:  # no publication exists that its weights could contradict
            self._ledger.record_verified(self._session.incarnation)

    def trainer_lost(self) -> None:
        """Handle the loss of the trainer's connection, which ends all running updates."""
        self._updates.clear()
        for engine in self._engines.by_instance.values():
            engine.fresh = True

    @property
    def must_verify(self) -> bool:
        """Whether a restarted trainer must report its digest: of a published version that it loaded, or of the last
        published version, to which it replays."""
        return self._session.step in self._to_verify

    def _published_versions(self, start: int) -> set[int]:
        """Return the versions at which a trainer that starts from ``start`` is compared with a publication."""
        return {version for version in (start, self.published) if version >= start and self._digest_of(version)}

    def _digest_of(self, version: int) -> str:
        """Return the digest of a version in the newest lineage that has it; empty if it was not published."""
        lineages = range(self.lineage, -1, -1)
        return next((self.digests[n, version] for n in lineages if (n, version) in self.digests), "")

    def _verify(self, digest: str) -> None:
        """Compare the weights of a restarted trainer with the publication of the same version. Weights that it loaded
        must be equal; weights that it computed again may differ in bits, and then start a new lineage."""
        step = self._session.step
        equal = self._digest_of(step) == digest
        if not equal and step == self._session.start:
            self._run.refuse_start(f"its weights are not those that were published as version {step}")
            return
        self._to_verify = {version for version in self._to_verify if version > step}
        if not self._to_verify:  # recorded, because a restarted coordinator needs it
            self._ledger.record_verified(self._session.incarnation)
        if equal:
            log.info("the trainer's weights equal the published version %d", step)
            return
        self.lineage += 1
        self._run.warn(
            f"lineage {self.lineage} starts at version {step}: after a restart of the trainer, the repeated steps "
            f"{self._session.start} to {step - 1} gave weights that differ in bits from the published ones"
        )
        self._publish(step, digest)
        self._run.start_new_lineage()

    # --- updates ---

    def outdated_engines(self) -> list[EngineRecord]:
        """Return the engines that need the trainer's weights and have no running update."""
        free = [e for e in self._engines.connected() if e.update is None and e.state not in ("starting", "leaving")]
        return [engine for engine in free if self._run.needs_weights(engine)]

    def begin_update(self, engines: list[EngineRecord]) -> m.SendWeights:
        """Start an update of ``engines`` and return the command; without engines the trainer only computes the
        digest."""
        self._last_update += 1
        timeout = self._spec.weight_sync.timeout_seconds + GRACE_SECONDS
        for engine in engines:
            engine.begin_update(self._last_update)
            asyncio.get_running_loop().call_later(timeout, self._expire, engine, self._last_update)
        names = {engine.instance for engine in engines} or {""}
        self._updates[self._last_update] = WeightUpdate(self.lineage, self._session.step, names, set(names))
        targets = [m.EngineTarget(engine.instance, engine.fresh) for engine in engines]
        return m.SendWeights(self._session.incarnation, self._last_update, targets)

    def weights_ready(self, message: m.WeightGroupReady) -> None:
        """Handle an opened weight group: tell the engine's agent to join it."""
        update = self._updates.get(message.update)
        if update is None:
            return
        update.unannounced.discard(message.engine)
        self._free_when_announced(update)
        engine = self._engines.by_instance.get(message.engine)
        if engine is None or engine.connection is None or engine.update != message.update:
            self._cancel_send(message.update, message.engine)
            return
        sync = self._spec.weight_sync
        engine.fresh = False
        engine.connection.send(
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
        """Handle the end of sending to one engine, or the trainer's digest."""
        update = self._updates.get(message.update)
        if update is None or not update.end(message.engine):
            return
        self._free_when_announced(update)
        if not update.unfinished:
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

    def _free_when_announced(self, update: WeightUpdate) -> None:
        newest = update is self._updates.get(self._last_update)
        if not update.unannounced and newest and self._session.busy == "SendWeights":
            self._session.busy = ""
            self._run.changed()

    def _publish(self, version: int, digest: str) -> None:
        """Record the digest of a version that is sent to engines."""
        key = (self.lineage, version)
        if self.digests.setdefault(key, digest) != digest:
            raise RuntimeError(f"version {version} of lineage {self.lineage} was published with two digests")
        self.published = max(self.published, version)
        self._ledger.record_publication(*key, digest, self._session.incarnation)

    def weight_ack(self, engine: EngineRecord, message: m.WeightAck) -> None:
        """Handle an update that the engine committed."""
        if engine.update == message.update:
            engine.ack = message
            self._commit(engine)
            self._run.changed()

    def weight_failed(self, engine: EngineRecord, message: m.WeightFailed) -> None:
        """Handle an update that the engine did not commit."""
        self._update_failed(engine.instance, message.update, message.reason)
        self._cancel_send(message.update, engine.instance)
        self._run.changed()

    def _commit(self, engine: EngineRecord) -> None:
        """If both sides are done, and digest and probe agree, the engine serves the version."""
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
                self._run.fail("LogprobMismatch", text)
                return
            log.warning("%s", text)
        engine.serving = (ack.lineage, ack.version)
        self._ledger.record_served(engine.instance, ack.lineage, ack.version, ack.digest)
        engine.failures = self._failures_in_a_row = 0
        self.seconds_in_updates += ack.seconds
        engine.end_update()

    def _dtype(self, engine: EngineRecord) -> str:
        return next((pool.dtype for pool in self._spec.rollouts if pool.name == engine.pool), "float32")

    # --- failed updates ---

    def _update_failed(self, instance: str, update: int, reason: str) -> None:
        engine = self._engines.by_instance.get(instance)
        if engine is None or engine.update != update:
            return
        engine.end_update()
        engine.serving, engine.fresh = None, True
        engine.failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._run.fail("WeightSyncFailed", f"no engine can receive weights any more; the last failure: {reason}")
        log.warning("weight update of engine %s failed: %s", instance, reason)
        if engine.failures >= FAILURES_BEFORE_RESTART and engine.connection is not None:
            engine.failures, engine.state = 0, "starting"
            engine.connection.send(m.RestartEngine(f"{FAILURES_BEFORE_RESTART} updates failed, the last: {reason}"))

    def _expire(self, engine: EngineRecord, update: int) -> None:
        """Fail an update whose agent is connected but does not respond, so that it does not block the run."""
        if engine.update == update:
            self._update_failed(engine.instance, update, "its agent did not report the result of the update in time")
            self._cancel_send(update, engine.instance)
            self._run.changed()

    def lose_engine(self, engine: EngineRecord) -> None:
        """Handle the loss of an engine: its update ends."""
        if engine.update is not None:
            self._cancel_send(engine.update, engine.instance)
        engine.end_update()

    def _cancel_send(self, update: int, engine: str) -> None:
        running, trainer = self._updates.get(update), self._session.connection
        if trainer is not None and running is not None and engine in running.unfinished:
            trainer.send(m.CancelSend(self._session.incarnation, update, engine))
