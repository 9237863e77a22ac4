"""Sends weights to engines while training continues: a copy of the weights and one thread per engine.

The threads use a copy, so the next step may start while a slow engine still receives; memory holds one copy for each
update in progress, and keeps the buffers of one. The death of an engine delays its own thread, never a step: a
cancelled send is answered at once, and its thread ends by the timeout without being joined.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from rljob.protocol.shared_messages import Probe
from rljob.protocol.trainer_protocol import CancelSend, EngineTarget, SendWeights, WeightGroupReady, WeightsSent
from rljob.trainer.weight_sender import WeightSender, WeightTransferError
from rljob.transfer.packed_weights import PackedWeights

log = logging.getLogger(__name__)

Job: TypeAlias = tuple[int, str]  # update, engine

IDLE_SECONDS = 600.0
"""The trainer is not notified when an engine dies between updates, so its group is closed after this time. If the
engine is alive and only had no update for this time, it joins a new group, which takes milliseconds."""


class BackgroundSender:
    """Runs the sends of rank 0.

    Args:
        sender: owner of the weight groups.
        transport: gloo, nccl or ipc, as in WeightGroupReady.
        post: sends WeightGroupReady and WeightsSent, from any thread.
    """

    def __init__(
        self, sender: WeightSender, transport: str, post: Callable[[WeightGroupReady | WeightsSent], None]
    ) -> None:
        self._sender = sender
        self._transport = transport
        self._post = post
        self._lock = threading.Lock()
        self._running: dict[Job, SendWeights] = {}
        self._cancelled: set[Job] = set()  # cancelled before they started

    def publish(self, command: SendWeights, weights: PackedWeights, probe: Probe) -> None:
        """Send ``weights`` to each engine of ``command`` in the background; without engines, post the digest only.
        The caller fills ``weights`` afterwards.

        Args:
            command: engines and number of the update.
            weights: of the version to publish.
            probe: computed with these weights.
        """
        self._sender.close_idle(IDLE_SECONDS)
        if not command.engines:
            threading.Thread(
                target=self._post_digest, args=(command, weights), name="weights-digest", daemon=True
            ).start()
        for target in command.engines:
            job = (command.update, target.engine)
            with self._lock:
                cancelled = job in self._cancelled
                self._cancelled.discard(job)
                if not cancelled:
                    self._running[job] = command
            if cancelled:
                self._post(_sent(command, target.engine, "", time.monotonic(), "cancelled"))
                continue
            threading.Thread(
                target=self._send,
                args=(command, target, weights, probe),
                name=f"weights-{target.engine}",
                daemon=True,
            ).start()

    def cancel(self, command: CancelSend) -> None:
        """Abandon one send and answer at once. Thread-safe; also valid before the send has started."""
        job = (command.update, command.engine)
        with self._lock:
            running = self._running.pop(job, None)
            if running is None:
                self._cancelled = {known for known in self._cancelled if known[0] == command.update} | {job}
        if running is not None:
            self._sender.close(command.engine)
            self._post(_sent(running, command.engine, "", time.monotonic(), "cancelled"))

    def forget(self) -> None:
        """Abandon all sends without an answer, because a coordinator that has just reconnected does not expect them."""
        with self._lock:
            jobs, self._running = list(self._running), {}
            self._cancelled.clear()
        for _, engine in jobs:
            self._sender.close(engine)

    def _post_digest(self, command: SendWeights, weights: PackedWeights) -> None:
        started = time.monotonic()
        self._post(_sent(command, "", weights.digest(), started, ""))

    def _send(self, command: SendWeights, target: EngineTarget, weights: PackedWeights, probe: Probe) -> None:
        started = time.monotonic()
        value, problem = "", ""
        try:
            rendezvous = self._sender.open(target.engine, target.fresh, target.workers)
            with self._lock:
                cancelled = self._running.get((command.update, target.engine)) is not command
            if cancelled:  # before the group was open, so nothing has closed it
                self._sender.close(target.engine)
                return
            self._post(
                WeightGroupReady(
                    incarnation=command.incarnation,
                    update=command.update,
                    engine=target.engine,
                    group=rendezvous.group,
                    address=rendezvous.address,
                    port=rendezvous.port,
                    world_size=rendezvous.world_size,
                    transport=self._transport,
                    parameters=[] if command.tensors == weights.tensors else weights.parameters,
                    probe=probe,
                    tensors=weights.tensors,
                )
            )
            value = self._sender.send(target.engine, weights)
        except WeightTransferError as error:
            problem = str(error)
        except Exception as error:  # reported like any failed send; the engine gets another update or is restarted
            log.exception("sending weights to %s failed", target.engine)
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            wanted = self._running.pop((command.update, target.engine), None) is command
        if wanted:
            self._post(_sent(command, target.engine, value, started, problem))
        if problem:
            log.warning("update %d: %s", command.update, problem)


def _sent(command: SendWeights, engine: str, digest: str, started: float, error: str) -> WeightsSent:
    seconds = time.monotonic() - started
    return WeightsSent(command.incarnation, command.update, engine, digest, seconds, error)
