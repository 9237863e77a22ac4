"""One trajectory in hand: runs its loop and keeps what the coordinator has to hear about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rljob.api.tasks import Task
from rljob.protocol.messages import GenerateRequest, LeaseTrajectory, TrajectoryFailed, TrajectoryScored, TurnTokens
from rljob.protocol.rewards import Score, ScoreItem
from rljob.runner.context import TrajectoryError
from rljob.runner.loops import Loop
from rljob.runner.prompts import Prompt, PromptCache
from rljob.runner.scoring import RewardClient
from rljob.runner.tokenizer import TextCodec

log = logging.getLogger(__name__)

TEXT_CHARACTERS = 4096


@dataclass(frozen=True)
class TaskRuntime:
    """What driving a task's trajectories takes."""

    task: Task
    loop: Loop
    reward: RewardClient
    max_model_length: int  # tokens, that an engine takes
    evaluation_temperature: float  # of held-out problems


class Trajectory:
    """A leased trajectory; implements :class:`rljob.runner.context.Context` for its loop.

    Args:
        lease: sample, row and turns that exist already.
        runtime: of its task.
        prompts: shared by all trajectories.
        codec: the policy's tokenizer.
        send: tells the coordinator.
    """

    def __init__(
        self,
        lease: LeaseTrajectory,
        runtime: TaskRuntime,
        prompts: PromptCache,
        codec: TextCodec,
        send: Callable[[object], None],
    ) -> None:
        self._lease = lease
        self._runtime = runtime
        self._prompts = prompts
        self._codec = codec
        self._send = send
        self._turns = {turn.turn: turn for turn in lease.turns}
        self._next_turn = 0
        self._need: GenerateRequest | None = None
        self._answer: asyncio.Future[TurnTokens] | None = None
        self._result: TrajectoryScored | TrajectoryFailed | None = None
        self._prompt: Prompt | None = None
        self._text = ""
        self._work = asyncio.create_task(self._run())

    @property
    def attempt(self) -> int:
        """Of the lease."""
        return self._lease.attempt

    @property
    def pending(self) -> GenerateRequest | TrajectoryScored | TrajectoryFailed | None:
        """What to say again after a reconnect."""
        return self._result or self._need

    @property
    def finished(self) -> bool:
        """Whether the result stands."""
        return self._result is not None

    def take(self, turn: TurnTokens) -> None:
        """Take a generated turn; one that is not waited for is ignored."""
        if self._need is not None and turn.turn == self._need.turn and self._answer and not self._answer.done():
            self._answer.set_result(turn)

    def cancel(self) -> None:
        """Stop: the trajectory is no longer wanted."""
        self._work.cancel()

    # --- what the loop sees -----------------------------------------------------------------------------------------

    @property
    def prompt(self) -> Prompt:
        """The row's prompt."""
        assert self._prompt is not None, "a loop starts after its prompt is made"
        return self._prompt

    async def generate(self, token_ids: bytes) -> TurnTokens:
        """See :meth:`rljob.runner.context.Context.generate`."""
        number, self._next_turn = self._next_turn, self._next_turn + 1
        turn = self._turns.get(number) or await self._ask(number, token_ids)
        if turn.prompt != token_ids:
            raise TrajectoryError(f"turn {number} was generated from another context than the one it has now")
        return turn

    def decode(self, token_ids: bytes) -> str:
        """See :meth:`rljob.runner.context.Context.decode`."""
        return self._codec.decode(token_ids)

    async def score(self, completion: str, finish: str) -> Score:
        """See :meth:`rljob.runner.context.Context.score`."""
        self._text = completion
        item = ScoreItem(
            sample=self._lease.sample,
            task=self._lease.task,
            prompt=self.prompt.text,
            completion=completion,
            finish=finish,
            problem=self.prompt.problem,
        )
        return await self._runtime.reward.score(item)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _make_prompt(self) -> Prompt:
        try:
            return await self._prompts.prompt(self._lease.task, self._lease.split, self._lease.row)
        except ValueError as error:  # the row, or the chat template with it: a sentence that stands for itself
            raise TrajectoryError(str(error)) from error

    async def _ask(self, number: int, token_ids: bytes) -> TurnTokens:
        sampling, length = self._runtime.task.sampling, len(token_ids) // 4
        limit = self._runtime.max_model_length
        room = limit - length
        if room < 1:
            raise TrajectoryError(
                f"the context of turn {number} has {length} tokens, maxModelLength is {limit}; "
                "raise it or make prompts shorter"
            )
        self._need = GenerateRequest(
            sample=self._lease.sample,
            turn=number,
            prompt=token_ids,
            max_tokens=min(sampling.max_tokens, room),
            temperature=(
                sampling.temperature if self._lease.split == "train" else self._runtime.evaluation_temperature
            ),
            stop_token_ids=self._codec.stop_token_ids,
            attempt=self._lease.attempt,
        )
        self._answer = asyncio.get_running_loop().create_future()
        self._send(self._need)
        turn = await self._answer
        self._need = None
        return turn

    async def _run(self) -> None:
        lease = self._lease
        try:
            self._prompt = await self._make_prompt()
            score = await self._runtime.loop(self)
        except TrajectoryError as error:
            self._finish(TrajectoryFailed(lease.sample, str(error), lease.attempt))
        except Exception as error:  # a problem or loop may raise anything: recorded, it fails one sample, not the run
            log.exception("sample %s failed", lease.sample)
            self._finish(TrajectoryFailed(lease.sample, f"{type(error).__name__}: {error}", lease.attempt))
        else:
            if score.error:
                self._finish(TrajectoryFailed(lease.sample, score.error, lease.attempt))
            else:
                text = self._text[:TEXT_CHARACTERS]
                self._finish(TrajectoryScored(lease.sample, score.reward, score.metrics, text, lease.attempt))

    def _finish(self, result: TrajectoryScored | TrajectoryFailed) -> None:
        self._need = None
        self._result = result
        self._send(result)
