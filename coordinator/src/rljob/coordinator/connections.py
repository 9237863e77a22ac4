"""Messages from agents, runners and the trainer, each to the method that takes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from rljob.coordinator.engines import Engine
from rljob.coordinator.metrics import REFUSED
from rljob.coordinator.peers import Peer
from rljob.coordinator.run import Run
from rljob.ledger.store import SCHEMA_VERSION
from rljob.protocol import messages as m

log = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""How long a lost connection may come back before its work goes to others."""

INCOMING: dict[str, Any] = {"agent": m.FromAgent, "runner": m.FromRunner, "trainer": m.FromTrainer}
DECODERS = {role: m.frame_decoder(union) for role, union in INCOMING.items()}


class Connections:
    """Dispatches the messages of all peers of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {
            m.RegisterEngine: self._register_engine,
            m.Completions: self._completions,
            m.GenerationFailed: self._with_engine(run.events.generation_failed),
            m.WeightAck: self._with_engine(run.policy.weight_ack),
            m.WeightFailed: self._with_engine(run.policy.weight_failed),
            m.EngineHeartbeat: self._with_engine(self._heartbeat),
            m.EngineDied: self._engine_died,
            m.RegisterTrainer: self._register_trainer,
            m.StepDone: self._of_trainer(run.policy.step_done),
            m.Checkpointed: self._of_trainer(run.policy.checkpointed),
            m.WeightsReady: self._of_trainer(run.policy.weights_ready),
            m.WeightsSent: self._of_trainer(run.policy.weights_sent),
            m.TrainerWaits: self._of_trainer(run.policy.trainer_waits),
            m.TrainerFailed: self._of_trainer(lambda message: run.fail("TrainerFailed", message.reason)),
            m.RegisterRunner: self._register_runner,
            m.NeedGeneration: lambda peer, message: run.trajectories.need(message, peer),
            m.Scored: run.events.scored,
            m.TrajectoryFailed: run.events.trajectory_failed,
        }

    def receive(self, peer: Peer, frame: bytes) -> None:
        """Take one frame. A frame that is not of the protocol is refused and the connection closed."""
        try:
            batch = DECODERS[peer.role].decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            REFUSED.labels(peer.role).inc()
            peer.refuse(f"this frame is not of protocol version {SCHEMA_VERSION}: {error}", fatal=True)
            return
        with self._run.guarded():
            for message in batch:
                self._handlers[type(message)](peer, message)

    def lost(self, peer: Peer) -> None:
        """A connection broke. Engines and runners get a moment to come back."""
        peer.open = False
        loop = asyncio.get_running_loop()
        if peer.role == "trainer":
            self._run.policy.lose(peer)
        elif peer.role == "runner":
            loop.call_later(GRACE_SECONDS, self._run.trajectories.lose_runner, peer)
        else:
            self._run.engines.deaths.pop(peer, None)
            engine = self._run.engines.of_peer(peer)
            if engine is not None:
                self._run.policy.lose_engine(engine)
                engine.peer = None
                loop.call_later(GRACE_SECONDS, self._forget_if_gone, engine)

    def _forget_if_gone(self, engine: Engine) -> None:
        if engine.peer is None:
            self._run.events.forget_engine(engine)

    def _register_engine(self, peer: Peer, message: m.RegisterEngine) -> None:
        if message.pool not in {pool.name for pool in self._run.spec.rollouts}:
            peer.refuse(f"the manifest has no rollout pool called {message.pool!r}", fatal=True)
            return
        peer.instance = message.instance
        self._run.events.register_engine(peer, message)

    def _register_trainer(self, peer: Peer, message: m.RegisterTrainer) -> None:
        peer.instance = message.instance
        if self._run.over:
            peer.send(m.Stop("the run is over"))
            return
        self._run.policy.register(peer, message)

    def _register_runner(self, peer: Peer, message: m.RegisterRunner) -> None:
        peer.instance = message.instance
        self._run.events.register_runner(peer, message)

    def _completions(self, peer: Peer, message: m.Completions) -> None:
        for completion in message.items:
            self._run.trajectories.completed(completion, peer)

    def _heartbeat(self, engine: Engine, message: m.EngineHeartbeat) -> None:
        if message.state == "starting" and engine.state != "starting":
            self._run.events.suspend_engine(engine)
        engine.state, engine.restarts = message.state, message.restarts
        engine.running, engine.waiting = message.running, message.waiting

    def _engine_died(self, peer: Peer, message: m.EngineDied) -> None:
        log.warning("pool %s: %s; its last lines:\n%s", message.pool, message.reason, message.last_lines)
        self._run.engines.deaths[peer] = message
        self._run.engines.died[message.pool] += 1

    def _with_engine(self, handler: Callable[[Engine, Any], None]) -> Callable[[Peer, Any], None]:
        def handle(peer: Peer, message: Any) -> None:
            engine = self._run.engines.of_peer(peer)
            if engine is not None:
                handler(engine, message)

        return handle

    def _of_trainer(self, handler: Callable[[Any], None]) -> Callable[[Peer, Any], None]:
        def handle(peer: Peer, message: Any) -> None:
            if self._run.policy.current(peer, message.incarnation):
                handler(message)
            else:
                REFUSED.labels(peer.role).inc()

        return handle
