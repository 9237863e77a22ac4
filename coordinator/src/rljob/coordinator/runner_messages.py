"""Handlers of runners' messages: leases, requests for tokens, rewards, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob.api.algorithm_presets import model_pools
from rljob.coordinator.connection import Connection
from rljob.coordinator.run import Run
from rljob.coordinator.trajectory import MAX_RUNNER_ENDS
from rljob.ledger.states import Kind
from rljob.protocol import runner_protocol as m
from rljob.protocol.model_logprobs import check_logprobs
from rljob.protocol.score_messages import credit_turns
from rljob.protocol.turn_states import check_states


class RunnerMessages:
    """Messages of runners. Repeated messages are acknowledged without effect."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def receive(self, connection: Connection, message: Any) -> None:
        """Handle one message of the union FromRunner."""
        match message:  # the most frequent ones first
            case m.GenerateRequest():
                self._generate_request(connection, message)
            case m.TrajectoryScored():
                self._scored(connection, message)
            case m.RegisterRunner():
                self._register(connection, message)
            case m.PoolAnswered():
                self._pool_answered(connection, message)
            case m.TrajectoryFailed():
                self._failed(connection, message)
            case m.GroupFiltered():
                self._run.decisions.answer(connection, message)
            case _:
                raise AssertionError(f"no handler for {message}")

    def disconnected(self, connection: Connection) -> Callable[[], None]:
        """Handle a lost connection: unless the runner reconnects in time, its leases and groups go to other runners."""

        def give_up() -> None:
            self._run.trajectories.lose_runner(connection)
            self._run.decisions.lose(connection)

        return give_up

    def _register(self, connection: Connection, message: m.RegisterRunner) -> None:
        run = self._run
        connection.instance = message.instance
        run.held_out = message.held_out
        for task in (run.spec.evaluation.tasks or []) if run.spec.evaluation is not None else []:
            if message.held_out.get(task) == 0:
                run.fail(
                    "NoHeldOutRows",
                    f"task {task} has no held-out rows to evaluate; set heldOutFraction, "
                    "heldOutPath or heldOutSplit of its data",
                )
        if message.before is not None:
            self._runner_end(message.before)
        run.trajectories.register_runner(connection, message.capacity, message.driving)
        run.decisions.register(connection)
        run.changed()

    def _runner_end(self, end: m.RunnerEnd) -> None:
        """Fail a sample whose code has ended several processes of runners. Runners that are lost by other causes do not
        count, however often: a sample must not fail because machines do."""
        run = self._run
        trajectory = run.trajectories.by_sample.get(end.sample)
        if trajectory is not None and trajectory.record_runner_end(end.lease):
            reason = f"its loop ended {MAX_RUNNER_ENDS} processes of runners; the last time {end.how}"
            run.outcomes.failed(trajectory, reason, "runner")

    def _generate_request(self, connection: Connection, message: m.GenerateRequest) -> None:
        trajectories = self._run.trajectories
        try:
            trajectories.request_generation(message, connection)
        except ValueError as error:
            self._run.outcomes.failed(trajectories.by_sample[message.sample], str(error), "protocol")

    def _pool_answered(self, connection: Connection, message: m.PoolAnswered) -> None:
        trajectories = self._run.trajectories
        try:
            trajectories.store_answer(message, connection)
        except ValueError as error:
            self._run.outcomes.failed(trajectories.by_sample[message.sample], str(error), "protocol")

    def _scored(self, connection: Connection, message: m.TrajectoryScored) -> None:
        run = self._run
        trajectory = run.trajectories.current(message, connection)
        if trajectory is not None:
            try:
                trajectory.check_turns(message.turns)
                check_states(message.states, message.turns)
                if trajectory.kind is Kind.TRAIN:
                    roles = model_pools(run.spec.algorithm, trajectory.task)
                    check_logprobs(message.logprobs, roles, trajectory.written)
                turn_rewards = credit_turns(message.turns, message.reward, message.turn_rewards)
            except ValueError as error:
                run.outcomes.failed(trajectory, str(error), "protocol")
            else:
                run.outcomes.scored(trajectory, turn_rewards, message)
        run.ledger.then_join(connection.acknowledge_trajectories, message.sample)

    def _failed(self, connection: Connection, message: m.TrajectoryFailed) -> None:
        run = self._run
        trajectory = run.trajectories.current(message, connection)
        if trajectory is not None:
            run.outcomes.failed(trajectory, message.reason, "runner")
        run.ledger.then_join(connection.acknowledge_trajectories, message.sample)
