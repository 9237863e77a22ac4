"""Sending weights to engines beside training: a copy of the weights and one thread per engine.

The threads work on a copy, so the next step may begin while a slow engine still receives; memory holds one copy for
each update under way. What an engine's death costs is its own thread's wait, never a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from rljob.protocol.messages import EngineTarget, Probe, SendWeights, WeightsReady, WeightsSent
from rljob.trainer.weights import WeightSender, WeightTransferError, describe, digest

log = logging.getLogger(__name__)

NamedTensors: TypeAlias = list[tuple[str, Tensor]]


class Publisher:
    """Runs the sends of rank 0.

    Args:
        sender: owner of the weight groups.
        transport: gloo or nccl, as the engines are told.
        post: takes WeightsReady and WeightsSent, from any thread.
    """

    def __init__(self, sender: WeightSender, transport: str, post: Callable[[Any], None]) -> None:
        self._sender = sender
        self._transport = transport
        self._post = post
        self._threads: dict[str, threading.Thread] = {}

    def publish(self, command: SendWeights, weights: NamedTensors, probe: Probe) -> None:
        """Send ``weights`` to each engine of ``command`` in the background; with none, post their digest.

        Args:
            command: what to send to whom.
            weights: whole tensors in wire order that nobody changes any more.
            probe: under these weights.
        """
        self._threads = {engine: thread for engine, thread in self._threads.items() if thread.is_alive()}
        if not command.engines:
            started = time.monotonic()
            value = digest(weights)
            seconds = time.monotonic() - started
            self._post(WeightsSent(command.incarnation, command.update, "", value, seconds, ""))
        for target in command.engines:
            before = None if target.fresh else self._threads.get(target.engine)
            thread = threading.Thread(
                target=self._send,
                args=(command, target, weights, probe, before),
                name=f"weights-{target.engine}",
                daemon=True,
            )
            self._threads[target.engine] = thread
            thread.start()

    def _send(
        self,
        command: SendWeights,
        target: EngineTarget,
        weights: NamedTensors,
        probe: Probe,
        before: threading.Thread | None,
    ) -> None:
        if before is not None:
            before.join()  # one group takes one update at a time, in order
        started = time.monotonic()
        value, problem = "", ""
        try:
            group = self._sender.open(target.engine, target.fresh)
            self._post(
                WeightsReady(
                    incarnation=command.incarnation,
                    update=command.update,
                    engine=target.engine,
                    group=group.group,
                    address=group.address,
                    port=group.port,
                    world_size=group.world_size,
                    transport=self._transport,
                    parameters=describe(weights),
                    probe=probe,
                )
            )
            value = self._sender.send(target.engine, weights)
        except WeightTransferError as error:
            problem = str(error)
        except Exception as error:  # reported like any failed send: the engine gets another update or restarts
            log.exception("sending weights to %s failed", target.engine)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.warning("update %d: %s", command.update, problem)
        seconds = time.monotonic() - started
        self._post(WeightsSent(command.incarnation, command.update, target.engine, value, seconds, problem))
