"""One trajectory in hand: runs its loop and keeps what the coordinator has to hear about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rljob.api.tasks import Task
from rljob.protocol.messages import Drive, NeedGeneration, Scored, TrajectoryFailed, TurnTokens
from rljob.protocol.rewards import Score, ScoreItem
from rljob.runner.context import TrajectoryError
from rljob.runner.loops import Loop
from rljob.runner.prompts import Prompt, PromptBook
from rljob.runner.scoring import RewardClient
from rljob.runner.text import TextCodec

log = logging.getLogger(__name__)

TEXT_CHARACTERS = 4096


@dataclass(frozen=True)
class TaskKit:
    """What driving a task's trajectories takes."""

    task: Task
    loop: Loop
    reward: RewardClient
    max_model_length: int  # tokens, that an engine takes
    evaluation_temperature: float  # of held-out problems


class Trajectory:
    """A leased trajectory; implements :class:`rljob.runner.context.Context` for its loop.

    Args:
        drive: the lease.
        kit: of its task.
        prompts: shared by all trajectories.
        codec: the policy's tokenizer.
        send: tells the coordinator.
    """

    def __init__(
        self, drive: Drive, kit: TaskKit, prompts: PromptBook, codec: TextCodec, send: Callable[[object], None]
    ) -> None:
        self._drive = drive
        self._kit = kit
        self._prompts = prompts
        self._codec = codec
        self._send = send
        self._turns = {turn.turn: turn for turn in drive.turns}
        self._next_turn = 0
        self._need: NeedGeneration | None = None
        self._answer: asyncio.Future[TurnTokens] | None = None
        self._result: Scored | TrajectoryFailed | None = None
        self._prompt: Prompt | None = None
        self._text = ""
        self._work = asyncio.create_task(self._run())

    @property
    def attempt(self) -> int:
        """Of the lease."""
        return self._drive.attempt

    @property
    def pending(self) -> NeedGeneration | Scored | TrajectoryFailed | None:
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
            sample=self._drive.sample,
            task=self._drive.task,
            prompt=self.prompt.text,
            completion=completion,
            finish=finish,
            problem=self.prompt.problem,
        )
        return await self._kit.reward.score(item)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _make_prompt(self) -> Prompt:
        try:
            return await self._prompts.prompt(self._drive.task, self._drive.split, self._drive.row)
        except ValueError as error:  # the row, or the chat template with it: a sentence that stands for itself
            raise TrajectoryError(str(error)) from error

    async def _ask(self, number: int, token_ids: bytes) -> TurnTokens:
        sampling, length = self._kit.task.sampling, len(token_ids) // 4
        room = self._kit.max_model_length - length
        if room < 1:
            raise TrajectoryError(
                f"the context of turn {number} has {length} tokens, maxModelLength is {self._kit.max_model_length}; "
                "raise it or make prompts shorter"
            )
        self._need = NeedGeneration(
            sample=self._drive.sample,
            turn=number,
            prompt=token_ids,
            max_tokens=min(sampling.max_tokens, room),
            temperature=(sampling.temperature if self._drive.split == "train" else self._kit.evaluation_temperature),
            stop_token_ids=self._codec.stop_token_ids,
            attempt=self._drive.attempt,
        )
        self._answer = asyncio.get_running_loop().create_future()
        self._send(self._need)
        turn = await self._answer
        self._need = None
        return turn

    async def _run(self) -> None:
        drive = self._drive
        try:
            self._prompt = await self._make_prompt()
            score = await self._kit.loop(self)
        except TrajectoryError as error:
            self._finish(TrajectoryFailed(drive.sample, str(error), drive.attempt))
        except Exception as error:  # a problem or loop may raise anything: recorded, it fails one sample, not the run
            log.exception("sample %s failed", drive.sample)
            self._finish(TrajectoryFailed(drive.sample, f"{type(error).__name__}: {error}", drive.attempt))
        else:
            if score.error:
                self._finish(TrajectoryFailed(drive.sample, score.error, drive.attempt))
            else:
                text = self._text[:TEXT_CHARACTERS]
                self._finish(Scored(drive.sample, score.reward, score.metrics, text, drive.attempt))

    def _finish(self, result: Scored | TrajectoryFailed) -> None:
        self._need = None
        self._result = result
        self._send(result)
