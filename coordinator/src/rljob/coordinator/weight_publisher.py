"""Publication of the trainer's weights to engines: updates, acknowledgements, digests, lineages.

The trainer sends weights to one engine or several in one update, and is free again once every engine was announced. An
engine serves a version once both ends report the same digest and the probe's log-probabilities agree.
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
"""Agent and trainer end an update by themselves at weightSync.timeoutSeconds, and must have reported it this much
later."""
MAX_FAILURES_IN_A_ROW = 12
"""Failed updates, of any engine, without a good one between, after which the run ends: restarting does not help."""


@dataclass(eq=False)
class TrainerSession:
    """The trainer process and what it does now."""

    connection: Connection | None = None
    incarnation: int = 0
    step: int = 0  # version of the weights the trainer holds
    busy: str = ""  # the command under way
    blocked: str = ""  # why the trainer cannot continue until a person helps


class PublisherRun(Protocol):
    """What the publisher needs of the run."""

    def needs_weights(self, engine: EngineRecord) -> bool:
        """Whether an engine is to be given the trainer's version."""

    def start_new_lineage(self) -> None:
        """What engines hold is of another lineage than the trainer from now on."""

    def fail(self, reason: str, message: str) -> None:
        """End the run."""

    def changed(self) -> None:
        """Something happened that may allow a next step."""


@dataclass
class WeightUpdate:
    """A SendWeights under way: what is sent, and which engines it has not been announced to and has not ended for. The
    engine named "" stands for no engine: the trainer computes the digest alone. The trainer sends from a copy, so it is
    free once all are announced."""

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
        self._verified = True
        self._last_update = 0
        self._updates: dict[int, WeightUpdate] = {}
        self._failures_in_a_row = 0  # of updates, over all engines

    def restore(self, record: TrainerRecord) -> None:
        """Restore the publications from the ledger. Updates are numbered so that an answer to an earlier coordinator
        process is never taken for one to this."""
        for lineage, version, digest in record.publications:
            self.digests[lineage, version] = digest
            self.lineage = max(self.lineage, lineage)
            self.published = max(self.published, version)
        self._verified = self.published < 0 or record.verified_incarnation == record.incarnation
        self._last_update = (record.starts + 1) << 32

    # --- the trainer comes and goes ---

    def trainer_registered(self, new_process: bool) -> None:
        """A trainer is connected: updates under way ended. A new process opens new weight groups, and must prove that
        its weights are those that were published."""
        self._updates.clear()
        for engine in self._engines.by_instance.values():
            engine.end_update()
            engine.fresh = engine.fresh or new_process
        if not new_process:
            return
        if self.published < 0 or self._session.step > self.published:
            self._set_verified()  # nothing was published that its weights could differ from
        else:
            self._verified = False

    def trainer_lost(self) -> None:
        """The trainer's connection is gone, and with it every update under way."""
        self._updates.clear()
        for engine in self._engines.by_instance.values():
            engine.fresh = True

    @property
    def must_verify(self) -> bool:
        """Whether a restarted trainer is at the version that was published last and has not shown its digest yet."""
        return not self._verified and self._session.step == self.published

    def _verify(self, digest: str) -> None:
        """Compare the weights of a restarted trainer with what was published of the same version."""
        self._set_verified()
        step = self._session.step
        if self.digests.get((self.lineage, step)) == digest:
            log.info("the trainer's weights equal what was published as version %d", step)
            return
        self.lineage += 1
        log.warning("version %d was not reproduced: lineage %d begins", step, self.lineage)
        self._publish(step, digest)
        self._run.start_new_lineage()

    def _set_verified(self) -> None:
        """The current trainer holds what was published; a restarted coordinator must know that."""
        self._verified = True
        self._ledger.record_verified(self._session.incarnation)

    # --- updates ---

    def outdated_engines(self) -> list[EngineRecord]:
        """Return the engines to send the trainer's weights to."""
        free = [e for e in self._engines.connected() if e.update is None and e.state not in ("starting", "leaving")]
        return [engine for engine in free if self._run.needs_weights(engine)]

    def begin_update(self, engines: list[EngineRecord]) -> m.SendWeights:
        """Begin an update of ``engines``; with none the trainer computes the digest alone. Return the command."""
        self._last_update += 1
        patience = self._spec.weight_sync.timeout_seconds + GRACE_SECONDS
        for engine in engines:
            engine.begin_update(self._last_update)
            asyncio.get_running_loop().call_later(patience, self._expire, engine, self._last_update)
        names = {engine.instance for engine in engines} or {""}
        self._updates[self._last_update] = WeightUpdate(self.lineage, self._session.step, names, set(names))
        targets = [m.EngineTarget(engine.instance, engine.fresh) for engine in engines]
        return m.SendWeights(self._session.incarnation, self._last_update, targets)

    def weights_ready(self, message: m.WeightGroupReady) -> None:
        """The trainer opened a group: ask the engine's agent to join it."""
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
        """Sending to one engine ended, or the trainer computed its digest."""
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

    def _free_when_announced(self, update: WeightUpdate) -> None:
        newest = update is self._updates.get(self._last_update)
        if not update.unannounced and newest and self._session.busy == "SendWeights":
            self._session.busy = ""
            self._run.changed()

    def _publish(self, version: int, digest: str) -> None:
        """Record what the engines are being given."""
        key = (self.lineage, version)
        if self.digests.setdefault(key, digest) != digest:
            raise RuntimeError(f"version {version} of lineage {self.lineage} was published with two digests")
        self.published = max(self.published, version)
        self._ledger.record_publication(*key, digest, self._session.incarnation)

    def weight_ack(self, engine: EngineRecord, message: m.WeightAck) -> None:
        """The engine committed an update."""
        if engine.update == message.update:
            engine.ack = message
            self._commit(engine)
            self._run.changed()

    def weight_failed(self, engine: EngineRecord, message: m.WeightFailed) -> None:
        """The engine did not commit an update."""
        self._update_failed(engine.instance, message.update, message.reason)
        self._cancel_send(message.update, engine.instance)
        self._run.changed()

    def _commit(self, engine: EngineRecord) -> None:
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

    # --- updates that fail ---

    def _update_failed(self, instance: str, update: int, reason: str) -> None:
        engine = self._engines.by_instance.get(instance)
        if engine is None or engine.update != update:
            return
        engine.end_update()
        engine.serving, engine.fresh = None, True
        engine.failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._run.fail("WeightSyncFailed", f"no engine can be given weights any more; the last failure: {reason}")
        log.warning("weights did not reach engine %s: %s", instance, reason)
        if engine.failures >= FAILURES_BEFORE_RESTART and engine.connection is not None:
            engine.failures, engine.state = 0, "starting"
            engine.connection.send(m.RestartEngine(f"{FAILURES_BEFORE_RESTART} updates failed, the last: {reason}"))

    def _expire(self, engine: EngineRecord, update: int) -> None:
        """An agent that is connected but never answers must not stop the run."""
        if engine.update == update:
            self._update_failed(engine.instance, update, "its agent did not say how the update ended")
            self._cancel_send(update, engine.instance)
            self._run.changed()

    def lose_engine(self, engine: EngineRecord) -> None:
        """An engine is gone: do not wait for it."""
        if engine.update is not None:
            self._cancel_send(engine.update, engine.instance)
        engine.end_update()

    def _cancel_send(self, update: int, engine: str) -> None:
        under_way, trainer = self._updates.get(update), self._session.connection
        if trainer is not None and under_way is not None and engine in under_way.unended:
            trainer.send(m.CancelSend(self._session.incarnation, update, engine))
