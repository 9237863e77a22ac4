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
from rljob.coordinator.progress import UpdateTotals
from rljob.ledger.queries import TrainerRecord
from rljob.ledger.writer import LedgerWriter
from rljob.protocol.agent_protocol import PrepareWeights, RestartEngine, WeightAck, WeightFailed
from rljob.protocol.known_tensors import KnownTensors
from rljob.protocol.trainer_protocol import CancelSend, EngineTarget, SendWeights, WeightGroupReady, WeightsSent

log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Agent and trainer end an update themselves after weightSync.timeoutSeconds, and must report that within this
additional time."""
MAX_FAILED_ROUNDS = 12
"""Consecutive rounds in which no engine committed an update, after which the run fails: restarts do not help."""


@dataclass(eq=False)
class TrainerSession:
    """The trainer process and its current command."""

    connection: Connection | None = None
    incarnation: int = 0
    start: int = 0  # version of the weights that the process started from
    digest: str = ""  # of the record of the checkpoint that it started from
    step: int = 0  # version of the weights the trainer holds
    busy: str = ""  # the running command
    writing: int | None = None  # version of the checkpoint that it writes beside its commands
    blocked: str = ""  # why the trainer cannot continue without a user's help


class PublisherRun(Protocol):
    """The part of the run that the publisher uses."""

    @property
    def version(self) -> int:
        """Trainer version of the run: batches applied."""

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
        self.before_trainer = -1
        """Last version that was published before this trainer process. A replay may give other weights of the versions
        up to it, as on another number of ranks."""
        self.digests: dict[tuple[int, int], str] = {}
        self.update_totals = UpdateTotals()
        self._to_verify: set[int] = set()  # versions at which the trainer's digest is compared with the published one
        self._last_update = 0
        self._updates: dict[int, WeightUpdate] = {}
        self._tensors = KnownTensors()  # of the trainer's model
        self._failed_rounds = 0  # in a row; since this trainer process registered
        self._round = 0
        """Last update of the current round: its updates start while the last ones of the previous round run. The run
        fails by rounds, because one cause makes the updates of all engines fail, whatever their number."""
        self._round_failure = ""  # reason of a failure in the current round; empty after a success
        self._round_succeeded = False

    def restore(self, record: TrainerRecord) -> None:
        """Restore the publications from the ledger. The update numbers of each coordinator process are distinct, so
        that a reply to an earlier process is never mistaken for a reply to this one."""
        for lineage, version, digest in record.publications:
            self.digests[lineage, version] = digest
            self.lineage = max(self.lineage, lineage)
            self.published = max(self.published, version)
        self.before_trainer = self.published
        if record.verified_incarnation != record.incarnation:
            self._to_verify = self._published_versions(record.start)
        self._last_update = (record.starts + 1) << 32

    # --- registration and loss of the trainer ---

    def trainer_registered(self, new_process: bool) -> None:
        """Handle a registered trainer: its earlier updates ended. A new process opens new weight groups, and must show
        that its weights equal the published ones: those that it loaded, and those after the replay."""
        self._end_updates(fresh=new_process)
        if not new_process:
            return
        self._failed_rounds = 0
        self.before_trainer = self.published
        self._to_verify = self._published_versions(self._session.start)
        if not self._to_verify:  # no publication exists that its weights could contradict
            self._ledger.record_verified(self._session.incarnation)

    def trainer_lost(self) -> None:
        """Handle the loss of the trainer's connection, which ends all running updates. They are no failures of the
        engines."""
        self._end_updates(fresh=True)

    def _end_updates(self, fresh: bool) -> None:
        """End all running updates without a result. An engine in an update may hold a mixture of weights, or weights
        that it has not acknowledged: it gets no requests until its next update."""
        self._updates.clear()
        for engine in self._engines.by_instance.values():
            if engine.update is not None:
                engine.end_update()
                engine.serving = None
            engine.fresh = engine.fresh or fresh
        self._round_failure = ""

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
        current = (self.lineage, self._run.version)
        outdated = [engine for engine in self._engines.connected() if engine.serving != current]
        if not outdated:
            return []  # nearly always: it is asked after every event while the trainer is free
        free = [e for e in outdated if e.update is None and e.state not in ("starting", "leaving")]
        return [engine for engine in free if self._run.needs_weights(engine)]

    def begin_update(self, engines: list[EngineRecord]) -> SendWeights:
        """Start an update of ``engines`` and return the command; without engines the trainer only computes the
        digest."""
        self._last_update += 1
        self._end_round_if_over()
        timeout = self._spec.weight_sync.timeout_seconds + GRACE_SECONDS
        for engine in engines:
            engine.begin_update(self._last_update)
            asyncio.get_running_loop().call_later(timeout, self._expire, engine, self._last_update)
        names = {engine.instance for engine in engines} or {""}
        self._updates[self._last_update] = WeightUpdate(self.lineage, self._session.step, names, set(names))
        workers = {pool.name: pool.parallelism.workers for pool in self._spec.rollouts}
        targets = [EngineTarget(engine.instance, engine.fresh, workers[engine.pool]) for engine in engines]
        return SendWeights(self._session.incarnation, self._last_update, targets, self._tensors.digest)

    def weights_ready(self, message: WeightGroupReady) -> None:
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
        parameters = self._tensors.of(message.tensors, message.parameters)
        if parameters is None:
            self._update_failed(engine.instance, message.update, "the trainer did not send the list of its tensors")
            self._cancel_send(message.update, message.engine)
            return
        has_list = bool(message.tensors) and engine.tensors == message.tensors
        sync = self._spec.weight_sync
        engine.fresh, engine.tensors = False, message.tensors
        engine.connection.send(
            PrepareWeights(
                update=message.update,
                lineage=update.lineage,
                version=update.version,
                group=message.group,
                address=message.address,
                port=message.port,
                world_size=message.world_size,
                transport=message.transport,
                bucket_bytes=sync.bucket_bytes,
                parameters=[] if has_list else parameters,
                probe=message.probe,
                in_flight=sync.in_flight,
                timeout_seconds=sync.timeout_seconds,
                engine=engine.instance,
                tensors=message.tensors,
            )
        )

    def weights_sent(self, message: WeightsSent) -> None:
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

    def weight_ack(self, engine: EngineRecord, message: WeightAck) -> None:
        """Handle an update that the engine committed."""
        if engine.update == message.update:
            engine.ack = message
            self._commit(engine)
            self._run.changed()

    def weight_failed(self, engine: EngineRecord, message: WeightFailed) -> None:
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
        if excess := self._probe_excess(ack):
            self._run.fail(
                "LogprobMismatch",
                f"engine {engine.instance} computes other log-probabilities than the trainer from the same weights of "
                f"version {ack.version}: {excess}; its model, kernels or quantization differ from the trainer's",
            )
            return
        engine.serving = (ack.lineage, ack.version)
        self._ledger.record_served(engine.instance, ack.lineage, ack.version, ack.digest)
        engine.failures = self._failed_rounds = 0
        self._round_failure, self._round_succeeded = "", True
        self.update_totals = self.update_totals.plus(ack.seconds, ack.pause_seconds)
        engine.end_update()
        self._end_round_if_over()

    def _probe_excess(self, ack: WeightAck) -> str:
        """Return how much the probe exceeds the tolerances, or nothing."""
        bound = self._spec.logprob_tolerance
        found = (
            ("by up to", ack.probe_error, bound.largest, bound.largest_field),
            ("by a mean of", ack.probe_mean, bound.mean, bound.mean_field),
        )
        return " and ".join(
            f"probe tokens differ {how} {value:.3g} nats ({field} is {largest:g})"
            for how, value, largest, field in found
            if not value <= largest  # also nan
        )

    # --- failed updates ---

    def _update_failed(self, instance: str, update: int, reason: str) -> None:
        engine = self._engines.by_instance.get(instance)
        if engine is None or engine.update != update:
            return
        engine.end_update()
        engine.serving, engine.fresh, engine.tensors = None, True, ""
        engine.failures += 1
        if update <= self._round and not self._round_succeeded:
            self._round_failure = reason
        self._end_round_if_over()
        log.warning("weight update of engine %s failed: %s", instance, reason)
        if engine.failures >= FAILURES_BEFORE_RESTART and engine.connection is not None:
            engine.failures, engine.state = 0, "starting"
            engine.connection.send(RestartEngine(f"{FAILURES_BEFORE_RESTART} updates failed, the last: {reason}"))

    def _end_round_if_over(self) -> None:
        """Start the next round once all updates of the current one have ended; count the current one if it failed."""
        for engine in self._engines.by_instance.values():
            if engine.update is not None and engine.update <= self._round:
                return
        current = (self.lineage, self.published)
        if (reason := self._round_failure) and all(e.serving != current for e in self._engines.connected()):
            self._failed_rounds += 1
            if self._failed_rounds >= MAX_FAILED_ROUNDS:
                message = f"no engine can receive weights any more; the last failure: {reason}"
                self._run.fail("WeightSyncFailed", message)
        self._round, self._round_failure, self._round_succeeded = self._last_update, "", False

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
            trainer.send(CancelSend(self._session.incarnation, update, engine))
