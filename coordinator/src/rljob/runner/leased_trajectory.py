"""A leased trajectory: runs its loop and keeps the message that the coordinator has not acknowledged yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rljob.api.tasks import Task
from rljob.protocol.contexts import GrowingDigest
from rljob.protocol.messages import (
    FromRunner,
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    TrajectoryFailed,
    TrajectoryScored,
    TurnTokens,
    encode_frame,
    frame_decoder,
)
from rljob.protocol.score_messages import Score, ScoreItem, ScoreTurn, credit_turns, usable
from rljob.runner.agents.leased_agent import AgentRuntime, LeasedAgent
from rljob.runner.context import TrajectoryError
from rljob.runner.cut_answer import answer_text
from rljob.runner.leased_episode import EnvironmentRuntime, LeasedEpisode
from rljob.runner.loops import Loop
from rljob.runner.prompts import Prompt, PromptSource
from rljob.runner.reward_routing import SampleScorer

log = logging.getLogger(__name__)

TEXT_CHARACTERS = 4096
ANOTHER_CONTEXT = (
    "turn {} was generated from another context than the one it has now; a loop that runs again must make the same "
    "calls"
)

_decoder = frame_decoder(FromRunner)


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


class LeasedTrajectory:
    """A leased trajectory; implements :class:`rljob.runner.context.Context` for its loop.

    Args:
        lease: sample, row, and the turns that were generated before.
        runtime: of the lease's task.
        prompts: shared by all trajectories.
        codec: the policy's tokenizer.
        send: sends a message to the coordinator.
    """

    def __init__(
        self,
        lease: LeaseTrajectory,
        runtime: TaskRuntime,
        prompts: PromptSource,
        codec: Codec,
        send: Callable[[object], None],
    ) -> None:
        self._lease = lease
        self._runtime = runtime
        self._prompts = prompts
        self._codec = codec
        self._send = send
        self._recorded = {turn.turn: turn for turn in lease.turns}
        self._turns: list[TurnTokens] = []  # that this run of the loop has received
        self._sequence = b""  # int32: context and answer of the last turn
        self._digest = GrowingDigest()  # of the sequence, and of what the open turn adds
        self._credits: list[float] = []  # reward of each turn from :meth:`reward`
        self._generating = False
        self._cancelled = False
        self._request: GenerateRequest | None = None
        self._answer: asyncio.Future[GenerateResult | TurnTokens] | None = None
        self._result: TrajectoryScored | TrajectoryFailed | None = None
        self._prompt: Prompt | None = None
        self._episode: LeasedEpisode | None = None
        self._agent: LeasedAgent | None = None
        self._stop: dict[int, list[str]] = {}  # turn → stop strings of its call, beside those of the task
        self._calls = 0  # of the loop, in progress
        self._watchdog: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def lease(self) -> int:
        """Number of the lease."""
        return self._lease.lease

    @property
    def pending(self) -> GenerateRequest | TrajectoryScored | TrajectoryFailed | None:
        """The message to send again after a reconnect."""
        return self._result or self._request

    @property
    def finished(self) -> bool:
        """Whether the trajectory has its result."""
        return self._result is not None

    def receive(self, result: GenerateResult | TurnTokens) -> None:
        """Accept a generated turn; a turn that the loop does not wait for is ignored."""
        if self._request is not None and result.turn == self._request.turn and self._answer and not self._answer.done():
            self._answer.set_result(result)

    def cancel(self) -> None:
        """Cancel the loop; no result is sent."""
        self._cancelled = True
        self._disarm()
        self._end_agent()
        self._task.cancel()

    # --- interface of the loop; see rljob.runner.context.Context ------------------------------------------------------

    @property
    def sample(self) -> str:
        """Id of the sample."""
        return self._lease.sample

    @property
    def prompt(self) -> Prompt:
        """The row's prompt."""
        assert self._prompt is not None, "a loop starts after its prompt is made"
        return self._prompt

    @property
    def episode(self) -> LeasedEpisode:
        """The episode of the task's environment."""
        if self._episode is None:
            raise TrajectoryError(f"task {self._lease.task} has no environment; name one in its environment")
        return self._episode

    @property
    def agent(self) -> LeasedAgent:
        """The agent program of the task."""
        if self._agent is None:
            raise TrajectoryError(f"task {self._lease.task} has no agent; name its program in its agent")
        return self._agent

    @property
    def room(self) -> int:
        """Tokens that fit after the last turn."""
        used = self._sequence or self.prompt.token_ids
        return max(0, self._runtime.max_model_length - len(used) // 4)

    async def generate(self, token_ids: bytes, max_tokens: int | None = None, stop: Sequence[str] = ()) -> TurnTokens:
        """Generate the next turn."""
        number = len(self._turns)
        if self._generating:
            raise TrajectoryError(f"the loop asks for another turn while turn {number} is generated; await it first")
        if not isinstance(token_ids, bytes) or len(token_ids) % 4 or not token_ids:
            raise TrajectoryError(f"the context of turn {number} is not the bytes of at least one int32 token id")
        if not token_ids.startswith(self._sequence):
            raise TrajectoryError(
                f"the context of turn {number} does not start with the context and the answer of turn {number - 1}; "
                "append observations to those token ids"
            )
        self._stop[number] = [*stop]
        given = token_ids[len(self._sequence) :]
        turn = self._recorded.get(number)
        if turn is None:
            turn = await self._request_turn(number, given, max_tokens)
        elif turn.given != given:
            raise TrajectoryError(ANOTHER_CONTEXT.format(number))
        else:
            self._digest.append(given)
        self._digest.append(turn.token_ids)
        self._sequence = token_ids + turn.token_ids
        self._turns.append(turn)
        self._credits.append(0.0)
        return turn

    def encode(self, text: str) -> bytes:
        """Return the token ids of an observation."""
        return self._codec.encode(text, special=False)

    def decode(self, token_ids: bytes) -> str:
        """Return the text of token ids."""
        return self._codec.decode(token_ids)

    def answer(self, turn: TurnTokens) -> str:
        """Return the text of an answer."""
        sampling, stop = self._runtime.task.sampling, self._stop.get(turn.turn, [])
        return answer_text(self._codec, sampling, turn.token_ids, turn.finish, stop)

    def reward(self, value: float) -> None:
        """Credit a reward to the last turn."""
        if not self._turns:
            raise TrajectoryError("the loop gives a reward before the first turn is generated")
        if not usable(value):
            raise TrajectoryError(f"the loop gives turn {len(self._turns) - 1} the reward {value}")
        self._credits[-1] += float(value)

    async def score(self, completion: str, finish: str) -> Score:
        """Return the score from the task's reward."""
        if not isinstance(completion, str):
            raise TrajectoryError(f"the loop gives a completion of type {type(completion).__name__} to score, not text")
        if self._runtime.reward is None:
            return Score(self._lease.sample, 0.0)
        item = ScoreItem(
            sample=self._lease.sample,
            task=self._lease.task,
            prompt=self.prompt.text,
            completion=completion,
            finish=finish,
            problem=self.prompt.problem,
            turns=self._texts() if len(self._turns) > 1 else [],
            response_tokens=len(self._turns[-1].token_ids) // 4 if self._turns else None,
            metadata={
                "split": self._lease.split,
                "row": self._lease.row,
                "attempt": self._lease.attempt,
                "maxTokens": self._runtime.task.sampling.max_tokens,
            },
        )
        with self._in_call():
            return await self._runtime.reward.score(item)

    # --- private ----------------------------------------------------------------------------------------------------

    def _texts(self) -> list[ScoreTurn]:
        """Return the text of the turns and observations after the context of the first turn."""
        texts: list[ScoreTurn] = []
        for number, turn in enumerate(self._turns):
            if number and turn.given:
                texts.append(ScoreTurn("observation", self.decode(turn.given)))
            texts.append(ScoreTurn("model", self.answer(turn)))
        return texts

    async def _make_prompt(self) -> Prompt:
        try:
            return await self._prompts.prompt(self._lease.task, self._lease.split, self._lease.row)
        except ValueError as error:  # from the row or the chat template: the message is ready for users
            raise TrajectoryError(str(error)) from error

    async def _request_turn(self, number: int, given: bytes, max_tokens: int | None) -> TurnTokens:
        sampling, length = self._runtime.task.sampling, (len(self._sequence) + len(given)) // 4
        most = sampling.max_tokens if max_tokens is None else min(sampling.max_tokens, max_tokens)
        limit = self._runtime.max_model_length
        room = limit - length
        if room < 1:
            raise TrajectoryError(
                f"the context of turn {number} has {length} tokens, maxModelLength is {limit}; "
                "raise it or make prompts shorter"
            )
        self._request = GenerateRequest(
            sample=self._lease.sample,
            turn=number,
            given=given,
            max_tokens=min(most, room),
            temperature=(
                sampling.temperature if self._lease.split == "train" else self._runtime.evaluation_temperature
            ),
            stop_token_ids=self._codec.stop_token_ids,
            attempt=self._lease.attempt,
            lease=self._lease.lease,
            stop=[*sampling.stop, *self._stop[number]],
            min_tokens=sampling.min_tokens,
            prefix_tokens=len(self._sequence) // 4,
            prefix=self._digest.digest() if number else "",
        )
        self._digest.append(given)
        self._answer = asyncio.get_running_loop().create_future()
        self._generating = True  # stays True if the loop cancels this call: the coordinator waits for this turn
        self._send(self._request)
        with self._in_call():
            result = await self._answer
        self._generating, self._request = False, None
        same = result.given == given if isinstance(result, TurnTokens) else result.context == self._digest.digest()
        if not same:
            raise TrajectoryError(ANOTHER_CONTEXT.format(number))
        return TurnTokens(number, given, result.token_ids, result.finish)

    @contextlib.contextmanager
    def _in_call(self) -> Iterator[None]:
        """The loop waits for an engine or a reward: the watchdog is off."""
        self._calls += 1
        self._disarm()
        try:
            yield
        finally:
            self._calls -= 1
            self._arm()

    def _arm(self) -> None:
        if not (self._calls or self._cancelled or self.finished):
            self._disarm()
            self._watchdog = asyncio.get_running_loop().call_later(self._runtime.stall_seconds, self._stall)

    def _disarm(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _stall(self) -> None:
        """Fail the sample of a loop that hangs. Its task may ignore the cancellation, so nothing waits for it."""
        seconds = self._runtime.stall_seconds
        self._fail(f"its loop made no call for {seconds:g} s; raise failurePolicy.stallSeconds, or correct the loop")
        self._task.cancel()

    async def _run(self) -> None:
        lease = self._lease
        try:
            self._prompt = await self._make_prompt()
            if self._runtime.environment is not None:
                self._episode = LeasedEpisode(
                    self._runtime.environment, lease, self._prompt, self._set_prompt, self._in_call
                )
            if self._runtime.agent is not None:
                self._agent = LeasedAgent(self._runtime.agent, lease, self, self._set_prompt)
            self._arm()
            result = self._scored(await self._runtime.loop(self))
        except TrajectoryError as error:
            self._fail(str(error))
        except asyncio.CancelledError:
            if self._cancelled or self.finished:
                raise
            self._fail("the loop was cancelled, or awaited a task that was cancelled")
        except (
            Exception,
            SystemExit,
        ) as error:  # a source or a loop may raise anything; only its sample fails
            log.exception("sample %s failed", lease.sample)
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._finish(result)
        finally:
            if self._episode is not None:
                self._episode.end()

    def _end_agent(self) -> None:
        if self._agent is not None:
            self._agent.end()

    def _set_prompt(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def _scored(self, score: Score) -> TrajectoryScored:
        """Return the result of a trajectory whose loop returned ``score``.

        Raises:
            TrajectoryError: the loop returned something other than a Score, an error, or a number that is not finite.
        """
        if not isinstance(score, Score):
            raise TrajectoryError(f"its loop returned {type(score).__name__}, not a Score")
        if score.error:
            raise TrajectoryError(score.error)
        if self._generating:
            raise TrajectoryError(f"its loop returned while turn {len(self._turns)} was generated")
        if len(self._turns) < len(self._recorded):
            raise TrajectoryError(
                f"its loop made {len(self._turns)} turns now and {len(self._recorded)} before; a loop that runs again "
                "must make the same calls"
            )
        try:
            reward = float(score.reward)
            credited = credit_turns(len(self._turns), reward, score.turn_rewards)
            if any(self._credits):
                reward = math.fsum([reward, *self._credits])
                together = [given + own for given, own in zip(credited, self._credits, strict=True)]
                credited = credit_turns(len(together), reward, together)
            metrics = {str(name): float(value) for name, value in score.metrics.items()}
        except (ValueError, OverflowError) as error:
            raise TrajectoryError(str(error)) from error
        for name, value in metrics.items():
            if not usable(value):
                raise TrajectoryError(f"the metric {name} of its score is {value}")
        lease, single = self._lease, not any(credited[:-1])
        result = TrajectoryScored(
            sample=lease.sample,
            reward=reward,
            metrics=metrics,
            text=self.answer(self._turns[-1])[:TEXT_CHARACTERS],
            turns=len(credited),
            attempt=lease.attempt,
            turn_rewards=[] if single else credited,
            lease=lease.lease,
        )
        try:  # a result that cannot be encoded must fail here, not in the connection that all trajectories share
            _decoder.decode(encode_frame([result]))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise TrajectoryError(f"its result cannot be sent: {error}") from error
        return result

    def _fail(self, reason: str) -> None:
        text = reason.encode(errors="replace").decode()  # lone surrogates in an exception message cannot be encoded
        self._finish(TrajectoryFailed(self._lease.sample, text, self._lease.attempt, self._lease.lease))

    def _finish(self, result: TrajectoryScored | TrajectoryFailed) -> None:
        self._disarm()
        self._end_agent()
        if self.finished:
            return
        self._request = None
        self._result = result
        self._send(result)
