"""The context of one branch of a leased trajectory; see :class:`rljob.runner.context.Context`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob.protocol.branches import MAX_NAME, ROOT, TurnKey, child, described
from rljob.protocol.contexts import GrowingDigest
from rljob.protocol.runner_protocol import GenerateRequest, PoolAnswer, TurnTokens
from rljob.protocol.score_messages import Score, ScoreItem, ScoreTurn, usable
from rljob.protocol.turn_states import state_digest
from rljob.runner.call_arguments import checked_max_tokens, checked_stop
from rljob.runner.context import TrajectoryError
from rljob.runner.cut_answer import answer_text
from rljob.runner.leased_episode import LeasedEpisode
from rljob.runner.pools.question import make_question
from rljob.runner.prompt_content import Messages
from rljob.runner.prompts import Prompt

if TYPE_CHECKING:
    from rljob.runner.agents.leased_agent import LeasedAgent
    from rljob.runner.leased_trajectory import LeasedTrajectory

ANOTHER_CONTEXT = (
    "{} was generated from another context than the one it has now; a loop that runs again must make the same calls"
)


class BranchContext:
    """A branch of a trajectory. ``parent``: the branch that it continues from; None: it begins the trajectory."""

    def __init__(self, trajectory: LeasedTrajectory, name: str = ROOT, parent: BranchContext | None = None) -> None:
        self.name = name
        self._trajectory = trajectory
        self._turns: list[TurnTokens] = [] if parent is None else [*parent._turns]  # also those that it continues
        self._sequence: bytes = b"" if parent is None else parent._sequence
        """Context and answer of the last turn, int32."""
        self._digest: GrowingDigest = GrowingDigest() if parent is None else parent._digest.copy()
        """Of the sequence, and of what the open turn adds."""
        self._children: Counter[int] = Counter()  # first turn → branches
        self._generating = False
        self._state = ""  # before the next turn

    @property
    def sample(self) -> str:
        """Id of the sample."""
        return self._trajectory.leased.sample

    @property
    def prompt(self) -> Prompt:
        """The row's prompt."""
        return self._trajectory.prompt

    @property
    def episode(self) -> LeasedEpisode:
        """The episode of the task's environment."""
        return self._trajectory.episode

    @property
    def agent(self) -> LeasedAgent:
        """The agent program of the task."""
        return self._trajectory.agent

    @property
    def room(self) -> int:
        """Tokens that fit after the last turn."""
        used = self._sequence or self.prompt.token_ids
        return max(0, self._trajectory.runtime.max_model_length - len(used) // 4)

    def branch(self) -> BranchContext:
        """Return a context that continues from the tokens of this one."""
        number = len(self._turns)
        if self._generating:
            raise TrajectoryError(
                f"the loop makes a branch while {described(number, self.name)} is generated; await it first"
            )
        name = child(self.name, number, self._children[number] + 1)
        if len(name) > MAX_NAME:
            raise TrajectoryError(
                f"the loop makes a branch of a branch {name.count('/')} times, so its name is longer than {MAX_NAME} "
                "characters; branch from an earlier context"
            )
        self._children[number] += 1
        return BranchContext(self._trajectory, name, self)

    async def generate(self, token_ids: bytes, max_tokens: int | None = None, stop: Sequence[str] = ()) -> TurnTokens:
        """Generate the next turn."""
        number = len(self._turns)
        key = (number, self.name)
        if self._generating:
            named = described(*key)
            raise TrajectoryError(f"the loop asks for another turn while {named} is generated; await it first")
        if not isinstance(token_ids, bytes) or len(token_ids) % 4 or not token_ids:
            raise TrajectoryError(f"the context of {described(*key)} is not the bytes of at least one int32 token id")
        if not token_ids.startswith(self._sequence):
            raise TrajectoryError(
                f"the context of {described(*key)} does not start with the context and the answer of turn "
                f"{number - 1}; append observations to those token ids"
            )
        asks = f"the loop asks for {described(*key)}"
        if max_tokens is not None:
            max_tokens = checked_max_tokens(asks, max_tokens)
        self._trajectory.stops[key] = checked_stop(asks, stop)
        self._trajectory.states[key], self._state = self._state, ""
        given = token_ids[len(self._sequence) :]
        turn = self._trajectory.recorded.get(key)
        if turn is None:
            turn = await self._request_turn(key, given, max_tokens)
        elif turn.given != given:
            raise TrajectoryError(ANOTHER_CONTEXT.format(described(*key)))
        else:
            self._digest.append(given)
        self._digest.append(turn.token_ids)
        self._sequence = token_ids + turn.token_ids
        self._turns.append(turn)
        self._trajectory.add(turn)
        return turn

    async def ask(
        self,
        pool: str,
        content: str | Messages,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        timeout_seconds: float | None = None,
    ) -> PoolAnswer:
        """Ask a frozen pool."""
        most = self._trajectory.runtime.task.sampling.max_tokens if max_tokens is None else max_tokens
        question = make_question(pool, content, most, temperature, top_p, stop)
        return await self._trajectory.questions.ask(self.name, len(self._turns), question, timeout_seconds)

    def encode(self, text: str) -> bytes:
        """Return the token ids of an observation."""
        return self._trajectory.codec.encode(text, special=False)

    def decode(self, token_ids: bytes) -> str:
        """Return the text of token ids."""
        return self._trajectory.codec.decode(token_ids)

    def answer(self, turn: TurnTokens) -> str:
        """Return the text of an answer."""
        sampling, stop = (
            self._trajectory.runtime.task.sampling,
            self._trajectory.stops.get((turn.turn, turn.branch), []),
        )
        return answer_text(self._trajectory.codec, sampling, turn.token_ids, turn.finish, stop)

    def state(self, name: str) -> None:
        """Name the state of the environment before the next turn."""
        if not isinstance(name, str):
            raise TrajectoryError(f"the loop names a state by {type(name).__name__}, not by text")
        self._state = state_digest(name)

    def reward(self, value: float) -> None:
        """Credit a reward to the last turn."""
        if not self._turns:
            raise TrajectoryError("the loop gives a reward before the first turn is generated")
        key = (self._turns[-1].turn, self._turns[-1].branch)
        if not usable(value):
            raise TrajectoryError(f"the loop gives {described(*key)} the reward {value}")
        self._trajectory.credits[key] += float(value)

    async def score(self, completion: str, finish: str) -> Score:
        """Return the score from the task's reward."""
        if not isinstance(completion, str):
            raise TrajectoryError(f"the loop gives a completion of type {type(completion).__name__} to score, not text")
        lease, runtime = self._trajectory.leased, self._trajectory.runtime
        if runtime.reward is None:
            return self._scored(Score(lease.sample, 0.0))
        item = ScoreItem(
            sample=lease.sample,
            task=lease.task,
            prompt=self.prompt.text,
            completion=completion,
            finish=finish,
            problem=self.prompt.problem,
            turns=self._texts() if len(self._turns) > 1 else [],
            response_tokens=len(self._turns[-1].token_ids) // 4 if self._turns else None,
            metadata={
                "split": lease.split,
                "row": lease.row,
                "attempt": lease.attempt,
                "maxTokens": runtime.task.sampling.max_tokens,
            },
            response_token_ids=self._last_token_ids() if runtime.reward.token_ids else None,
        )
        with self._trajectory.in_call():
            return self._scored(await runtime.reward.score(item))

    def _last_token_ids(self) -> list[int] | None:
        return array("i", self._turns[-1].token_ids).tolist() if self._turns else None

    def _scored(self, score: Score) -> Score:
        if self._turns:
            self._trajectory.scores.append((score, self._turns[-1].branch))
        return score

    def _texts(self) -> list[ScoreTurn]:
        """Return the text of the turns and observations after the context of the first turn."""
        texts: list[ScoreTurn] = []
        for number, turn in enumerate(self._turns):
            if number and turn.given:
                texts.append(ScoreTurn("observation", self.decode(turn.given)))
            texts.append(ScoreTurn("model", self.answer(turn)))
        return texts

    async def _request_turn(self, key: TurnKey, given: bytes, max_tokens: int | None) -> TurnTokens:
        lease, runtime, codec = self._trajectory.leased, self._trajectory.runtime, self._trajectory.codec
        sampling, length = runtime.task.sampling, (len(self._sequence) + len(given)) // 4
        most = sampling.max_tokens if max_tokens is None else min(sampling.max_tokens, max_tokens)
        room = runtime.max_model_length - length
        if room < 1:
            raise TrajectoryError(
                f"the context of {described(*key)} has {length} tokens, maxModelLength is {runtime.max_model_length}; "
                "raise it or make prompts shorter"
            )
        request = GenerateRequest(
            sample=lease.sample,
            turn=key[0],
            given=given,
            max_tokens=min(most, room),
            temperature=sampling.temperature if lease.split == "train" else runtime.evaluation_temperature,
            stop_token_ids=codec.stop_token_ids,
            attempt=lease.attempt,
            lease=lease.lease,
            stop=[*sampling.stop, *self._trajectory.stops[key]],
            min_tokens=sampling.min_tokens,
            prefix_tokens=len(self._sequence) // 4,
            prefix=self._digest.digest() if self._turns else "",
            branch=self.name,
        )
        self._digest.append(given)
        self._generating = True  # stays True if the loop cancels this call: the coordinator waits for this turn
        result = await self._trajectory.request(request)
        self._generating = False
        same = result.given == given if isinstance(result, TurnTokens) else result.context == self._digest.digest()
        if not same:
            raise TrajectoryError(ANOTHER_CONTEXT.format(described(*key)))
        return TurnTokens(key[0], given, result.token_ids, result.finish, self.name)
