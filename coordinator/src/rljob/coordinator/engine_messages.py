"""Handlers of agents' messages: registration and loss of engines, completions, weight updates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord
from rljob.coordinator.event_counts import Requeue
from rljob.coordinator.run import Run
from rljob.protocol import agent_protocol as m

log = logging.getLogger(__name__)

MAX_RETURNS = 8
"""Number of failed requests of a branch in a row after which the next failure fails the sample."""


class EngineMessages:
    """Messages of agents. Messages of an unregistered engine are dropped, except completions and crashes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def receive(self, connection: Connection, message: Any) -> None:
        """Handle one message of the union FromAgent."""
        match message:  # the most frequent ones first
            case m.Completions():
                for completion in message.items:
                    self._completed(connection, completion)
            case m.RegisterEngine():
                self._register(connection, message)
            case m.EngineCrashed():
                self._crashed(connection, message)
            case _:
                engine = self._run.engines.of_connection(connection)
                if engine is not None:
                    self._of_engine(engine, message)

    def _of_engine(self, engine: EngineRecord, message: Any) -> None:
        match message:
            case m.PrefixMissing():
                self._run.trajectories.send_whole_context(engine, message.request_id)
            case m.GenerationFailed():
                self._generation_failed(engine, message)
            case m.WeightAck():
                if engine.update == message.update:
                    spent = self._run.progress.engines
                    spent.acknowledged(engine, message.pause_seconds, message.seconds_since_resume)
                self._run.weights.weight_ack(engine, message)
            case m.WeightFailed():
                self._run.weights.weight_failed(engine, message)
            case m.EngineHeartbeat():
                self._heartbeat(engine, message)
            case _:
                raise AssertionError(f"no handler for {message}")

    def disconnected(self, connection: Connection) -> Callable[[], None] | None:
        """Handle a lost connection: unless the agent reconnects in time, the engine's requests go to other engines."""
        run = self._run
        run.engines.crashed.pop(connection, None)
        engine = run.engines.of_connection(connection)
        if engine is None:
            return None
        run.weights.lose_engine(engine)
        engine.connection = None
        return lambda: self._forget_if_gone(engine)

    def _forget_if_gone(self, engine: EngineRecord) -> None:
        if engine.connection is None:
            self.forget(engine)

    # --- registration and loss of engines ---

    def _register(self, connection: Connection, message: m.RegisterEngine) -> None:
        """Register an engine, or register it again."""
        run = self._run
        pool = next((pool for pool in run.spec.policy_pools if pool.name == message.pool), None)
        if pool is None:
            connection.reject(f"the manifest has no rollout pool {message.pool!r}", fatal=True)
            return
        before = run.engines.of_connection(connection)
        connection.instance = message.instance
        if before is not None and before.instance != message.instance:
            self.forget(before)
        engine = run.engines.by_instance.get(message.instance)
        if engine is None:
            engine = EngineRecord(
                message.instance,
                message.max_concurrency,
                message.max_model_length,
                pool=message.pool,
                connection=connection,
                pod=message.pod,
                evaluates=pool.purpose == "evaluation",
            )
            engine.draining = run.draining.drains(engine)
            run.engines.register(engine)
            run.silent.watch(engine, run.now)
        engine.connection, engine.state, engine.tensors = connection, "ready", ""
        holds = (message.lineage, message.version)
        known = message.version >= 0 and run.weights.digests.get(holds) == message.digest
        engine.serving = holds if known else None
        engine.end_update()
        run.trajectories.register_engine(engine, message.running)
        run.changed()

    def forget(self, engine: EngineRecord) -> None:
        """Remove an engine; its requests go to other engines. Does nothing if it is already removed, even if another
        engine with the same instance name has registered since."""
        run = self._run
        if run.engines.by_instance.get(engine.instance) is engine:
            run.engines.remove(engine)
            self._reassign(engine, "engine_lost")

    def _reassign(self, engine: EngineRecord, reason: Requeue) -> None:
        self._run.weights.lose_engine(engine)
        self._run.trajectories.lose_engine(engine, reason)
        self._run.changed()

    def _heartbeat(self, engine: EngineRecord, message: m.EngineHeartbeat) -> None:
        if message.state == "starting" and engine.state != "starting":  # its server exited and another one is starting
            engine.serving = None
            self._reassign(engine, "engine_restarted")
        engine.state, engine.restarts = message.state, message.restarts
        engine.running, engine.waiting = message.running, message.waiting
        self._run.changed()  # it may have been silent or not ready: it gets requests again

    def _crashed(self, connection: Connection, message: m.EngineCrashed) -> None:
        log.warning("pool %s: %s; its last lines:\n%s", message.pool, message.reason, message.last_lines)
        self._run.engines.crashed[connection] = message
        self._run.engines.crashes[message.pool] += 1

    def _completed(self, connection: Connection, completion: m.Completion) -> None:
        run, request_id = self._run, completion.request_id
        try:
            run.trajectories.completed(completion, connection)
        except ValueError as error:
            run.outcomes.failed(run.trajectories.by_sample[request_id.sample], str(error), "protocol")
            run.ledger.then_join(connection.acknowledge_completions, request_id)

    def _generation_failed(self, engine: EngineRecord, message: m.GenerationFailed) -> None:
        run = self._run
        key = message.request_id.key
        if key not in engine.requests:
            return  # the request is no longer assigned to this engine
        reason = message.reason
        if not message.permanent:
            if run.trajectories.returned(engine, message.request_id) <= MAX_RETURNS:
                return
            reason = f"engines failed to generate it {MAX_RETURNS + 1} times; the last reason: {message.reason}"
        run.outcomes.failed(run.trajectories.by_sample[message.request_id.sample], reason, "generation")
