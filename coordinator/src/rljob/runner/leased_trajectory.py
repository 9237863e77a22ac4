"""A leased trajectory: runs its loop and keeps the message that the coordinator has not acknowledged yet."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rljob.api.tasks import Task
from rljob.protocol.branches import TurnKey, described
from rljob.protocol.runner_protocol import (
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    PoolAnswered,
    TrajectoryFailed,
    TrajectoryScored,
    TurnTokens,
)
from rljob.protocol.score_messages import Score
from rljob.runner.agents.leased_agent import AgentRuntime, LeasedAgent
from rljob.runner.branch_context import BranchContext
from rljob.runner.context import TrajectoryError
from rljob.runner.error_text import described_error, text_of
from rljob.runner.leased_episode import EnvironmentRuntime, LeasedEpisode
from rljob.runner.loops import Loop
from rljob.runner.pools.leased_questions import NO_POOLS, LeasedQuestions, PoolRuntime
from rljob.runner.pools.sample_logprobs import sample_logprobs
from rljob.runner.prompts import Prompt, PromptSource
from rljob.runner.reward_routing import SampleScorer
from rljob.runner.sample_tasks import Owner, RunningSample, start_for
from rljob.runner.trajectory_result import scored_message

log = logging.getLogger(__name__)

MOST_REASON = 4096
"""Characters of the reason of a failed sample: all trajectories share the connection that sends it."""

MOST_OPEN_TURNS = 256
"""Of a sample, at a time. Its requests precede those of younger samples; without a limit one loop could stop them."""


class Codec(Protocol):
    """Encodes and decodes text, as :class:`rljob.runner.tokenizer.TextCodec` does."""

    stop_token_ids: list[int]

    def encode(self, text: str, special: bool = True) -> bytes:
        """Return token ids (int32 bytes)."""

    def decode(self, token_ids: bytes) -> str:
        """Return the text of token ids, without special tokens."""


@dataclass(frozen=True)
class TaskRuntime:
    """Task, loop and reward of a task's trajectories, and their limits."""

    task: Task
    loop: Loop
    reward: SampleScorer | None  # None: the rewards of the environment are the score
    max_model_length: int  # tokens of the longest sequence that an engine accepts
    evaluation_temperature: float  # sampling temperature of held-out problems
    stall_seconds: float  # a loop that makes no call of its context for this long has failed
    environment: EnvironmentRuntime | None = None
    agent: AgentRuntime | None = None
    pools: PoolRuntime = NO_POOLS


class _InCall(AbstractContextManager[None]):
    """See :meth:`LeasedTrajectory.in_call`; entered for every turn."""

    def __init__(self, trajectory: LeasedTrajectory) -> None:
        self._trajectory = trajectory

    def __enter__(self) -> None:
        self._trajectory.begin_call()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._trajectory.end_call()


class LeasedTrajectory:
    """A leased trajectory, whose loop drives it by :class:`rljob.runner.branch_context.BranchContext`.

    Args:
        lease: sample, row, and the turns that were generated before.
        runtime: of the lease's task.
        prompts: shared by all trajectories.
        codec: the policy's tokenizer.
        send: sends a message to the coordinator.
        running: has the sample while its code runs.
    """

    def __init__(
        self,
        lease: LeaseTrajectory,
        runtime: TaskRuntime,
        prompts: PromptSource,
        codec: Codec,
        send: Callable[[object], None],
        running: RunningSample | None = None,
    ) -> None:
        self.leased = lease
        self.runtime = runtime
        self.codec = codec
        self.recorded = {(turn.turn, turn.branch): turn for turn in lease.turns}
        self.credits: dict[TurnKey, float] = {}  # reward of each turn from the loop
        self.states: dict[TurnKey, str] = {}  # digest of the state before each turn that the loop named
        self.stops: dict[TurnKey, list[str]] = {}  # stop strings of the loop's calls, beside those of the task
        self.scores: list[tuple[Score, str]] = []  # from the task's reward, each with the branch that was scored
        self.questions = LeasedQuestions(runtime.pools, lease, send, self.in_call)
        self._prompts = prompts
        self._send = send
        self._turns: dict[TurnKey, TurnTokens] = {}  # that this run of the loop has received
        self._cancelled = False
        self._requests: dict[TurnKey, GenerateRequest] = {}  # of the turns that are generated
        self._answers: dict[TurnKey, asyncio.Future[GenerateResult | TurnTokens]] = {}
        self._result: TrajectoryScored | TrajectoryFailed | None = None
        self._prompt: Prompt | None = None
        self._episode: LeasedEpisode | None = None
        self._agent: LeasedAgent | None = None
        self._calls = 0  # of the loop, in progress
        self._loop = asyncio.get_running_loop()
        self._stalls_at = math.inf  # time of the event loop
        self._watchdog: asyncio.TimerHandle | None = None
        self._task = start_for(Owner.of(running or RunningSample(), lease.sample, lease.lease), self._run())

    @property
    def lease(self) -> int:
        """Number of the lease."""
        return self.leased.lease

    @property
    def pending(self) -> list[GenerateRequest | PoolAnswered | TrajectoryScored | TrajectoryFailed]:
        """The messages to send again after a reconnect."""
        return [*self.questions.pending, *self._requests.values()] if self._result is None else [self._result]

    @property
    def finished(self) -> bool:
        """Whether the trajectory has its result."""
        return self._result is not None

    def receive(self, result: GenerateResult | TurnTokens) -> None:
        """Accept a generated turn; a turn that the loop does not wait for is ignored."""
        answer = self._answers.get((result.turn, result.branch))
        if answer is not None and not answer.done():
            answer.set_result(result)

    def cancel(self) -> None:
        """Cancel the loop; no result is sent."""
        self._cancelled = True
        self._end_watchdog()
        self._end_agent()
        self._end_calls()
        self._task.cancel()

    # --- for its branches -------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> Prompt:
        """The row's prompt."""
        assert self._prompt is not None, "a loop starts after its prompt is made"
        return self._prompt

    @property
    def episode(self) -> LeasedEpisode:
        """The episode of the task's environment."""
        if self._episode is None:
            raise TrajectoryError(f"task {self.leased.task} has no environment; name one in its environment")
        return self._episode

    @property
    def agent(self) -> LeasedAgent:
        """The agent program of the task."""
        if self._agent is None:
            raise TrajectoryError(f"task {self.leased.task} has no agent; name its program in its agent")
        return self._agent

    def add(self, turn: TurnTokens) -> None:
        """Add a turn that the loop has received."""
        key = (turn.turn, turn.branch)
        self._turns[key], self.credits[key] = turn, 0.0

    async def request(self, request: GenerateRequest) -> GenerateResult | TurnTokens:
        """Send the request of a turn; return the answer.

        Raises:
            TrajectoryError: the trajectory has ended, or this is a turn too many.
        """
        if self.finished or self._cancelled:
            raise TrajectoryError("the loop asks for a turn after the end of its trajectory")
        if len(self._requests) >= MOST_OPEN_TURNS:
            reason = f"its loop asks for more than {MOST_OPEN_TURNS} turns at a time; await some before the next ones"
            self._give_up(reason)  # the loop may not await the task that asks
            raise TrajectoryError(reason)
        key = (request.turn, request.branch)
        self._requests[key] = request
        answer: asyncio.Future[GenerateResult | TurnTokens] = self._loop.create_future()
        self._answers[key] = answer
        self._send(request)
        with self.in_call():
            result = await answer
        self._requests.pop(key, None)
        self._answers.pop(key, None)
        return result

    def in_call(self) -> AbstractContextManager[None]:
        """The loop waits for an engine, a frozen pool or a reward: the watchdog is off."""
        return _InCall(self)

    def begin_call(self) -> None:
        """A call of :meth:`in_call` begins."""
        self._calls += 1
        self._stalls_at = math.inf

    def end_call(self) -> None:
        """A call of :meth:`in_call` ends."""
        self._calls -= 1
        self._arm()

    # --- private ----------------------------------------------------------------------------------------------------

    async def _make_prompt(self) -> Prompt:
        try:
            return await self._prompts.prompt(self.leased.task, self.leased.split, self.leased.row)
        except ValueError as error:  # from the row or the chat template: the message is ready for users
            raise TrajectoryError(str(error)) from error

    def _arm(self) -> None:
        """Give the loop stall_seconds until its next call. A timer that is set stays: most calls end long before."""
        if not (self._calls or self._cancelled or self.finished):
            self._stalls_at = self._loop.time() + self.runtime.stall_seconds
            if self._watchdog is None:
                self._watchdog = self._loop.call_at(self._stalls_at, self._check_stall)

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _check_stall(self) -> None:
        """Fail the sample of a loop that hangs."""
        self._watchdog = None
        if self._stalls_at == math.inf:
            return
        if self._loop.time() < self._stalls_at:
            self._watchdog = self._loop.call_at(self._stalls_at, self._check_stall)
            return
        seconds = self.runtime.stall_seconds
        self._give_up(f"its loop made no call for {seconds:g} s; raise failurePolicy.stallSeconds, or correct the loop")

    async def _run(self) -> None:
        lease, context = self.leased, BranchContext(self)  # not kept: cycles would occupy memory until a collection
        try:
            self._prompt = await self._make_prompt()
            if self.runtime.environment is not None:
                self._episode = LeasedEpisode(
                    self.runtime.environment, lease, self._prompt, self._set_prompt, self.in_call
                )
            if self.runtime.agent is not None:
                pools = self.runtime.pools.frozen
                self._agent = LeasedAgent(self.runtime.agent, lease, context, self._set_prompt, pools)
            self._arm()
            result = self._scored(context, await self.runtime.loop(context))
            if self.runtime.pools.roles and lease.split == "train":
                with self.in_call():
                    result.logprobs = await sample_logprobs(self._turns, self.runtime.pools)
        except TrajectoryError as error:
            self._fail(text_of(error))
        except asyncio.CancelledError:
            if self._cancelled or self.finished:
                raise
            self._fail("the loop was cancelled, or awaited a task that was cancelled")
        except BaseException as error:  # a source or a loop may raise anything; only its sample fails
            if asyncio.current_task(self._loop) is not self._task:  # GeneratorExit of a task that is destroyed
                raise
            log.exception("sample %s failed", lease.sample)
            self._fail(described_error(error))
        else:
            self._finish(result)
        finally:
            if self._episode is not None:
                self._episode.end()

    def _end_calls(self) -> None:
        """Cancel the calls of tasks that the loop left behind."""
        self.questions.end()
        self._requests.clear()
        for answer in self._answers.values():
            answer.cancel()

    def _end_agent(self) -> None:
        if self._agent is not None:
            self._agent.end()

    def _set_prompt(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def _scored(self, context: BranchContext, score: Score) -> TrajectoryScored:
        """Return the result of a trajectory whose loop was called with ``context`` and returned ``score``.

        Raises:
            TrajectoryError: the loop returned something other than a Score, an error, or a number that is not finite.
        """
        if not isinstance(score, Score):
            raise TrajectoryError(f"its loop returned {type(score).__name__}, not a Score")
        if score.error:
            raise TrajectoryError(score.error)
        for key in self._requests:
            raise TrajectoryError(f"its loop returned while {described(*key)} was generated")
        if len(self._turns) < len(self.recorded):
            raise TrajectoryError(
                f"its loop made {len(self._turns)} turns now and {len(self.recorded)} before; a loop that runs again "
                "must make the same calls"
            )
        return scored_message(
            self.leased, score, self.credits, self.scores, self.states, lambda last: context.answer(self._turns[last])
        )

    def _give_up(self, reason: str) -> None:
        """Fail the sample and end its loop, whose task may ignore the cancellation: nothing waits for it."""
        self._fail(reason)
        self._task.cancel()

    def _fail(self, reason: str) -> None:
        if len(reason) > MOST_REASON:
            reason = f"{reason[: MOST_REASON - 1]}…"
        text = reason.encode(errors="replace").decode()  # lone surrogates in an exception message cannot be encoded
        self._finish(TrajectoryFailed(self.leased.sample, text, self.leased.attempt, self.leased.lease))

    def _finish(self, result: TrajectoryScored | TrajectoryFailed) -> None:
        self._end_watchdog()
        self._end_agent()
        if self.finished or self._cancelled:
            return
        self._end_calls()
        self._result = result
        self._send(result)
