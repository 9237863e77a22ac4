"""The interface of a loop: the trajectory that a loop drives.

A loop is an async function with one argument, the :class:`Context` of a trajectory. It returns the sample's score:

    async def guess_twice(context: Context) -> Score:
        first = await context.generate(context.prompt.token_ids)
        observation = context.encode("\\nWrong. Try again.\\n")
        second = await context.generate(context.prompt.token_ids + first.token_ids + observation)
        return await context.score(context.answer(second), second.finish)

A context is a concatenation of token ids. Tokens of the model are never decoded and encoded again: the context of each
turn starts with the context and the answer of the previous turn. The tokens added after them are the observation.

:meth:`Context.branch` returns a context that continues from the same tokens on its own, as often as wanted, so a loop
can try several continuations. Each context has one turn at a time; several contexts generate at the same time:

    async def two_ways(context: Context) -> Score:
        first = await context.generate(context.prompt.token_ids)
        tokens = context.prompt.token_ids + first.token_ids
        one, two = context.branch(), context.branch()
        await asyncio.gather(one.generate(tokens + one.encode("a)")), two.generate(tokens + two.encode("b)")))
        last = await context.generate(tokens + context.encode("So"))
        return await context.score(context.answer(last), last.finish)

The sample has one reward. Each token that the model wrote is trained once, under the context of its own branch.

:meth:`Context.ask` asks a frozen pool of the job, for example a teacher. Its answer is text, which the loop can encode
into the next context: it is an observation, and not trained.

If a runner dies, the loop runs again in another runner. Turns that were generated before, and answers of frozen pools,
are replayed from the ledger. A loop must therefore make the same calls again: it depends on its context alone, not on a
clock, on unseeded random numbers or on which of its branches is faster. An exception of a loop fails its sample, not
the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rljob.api.tasks import TaskEnvironment
from rljob.protocol.episode_messages import Observation
from rljob.protocol.runner_protocol import PoolAnswer, TurnTokens
from rljob.protocol.score_messages import Score
from rljob.runner.prompt_content import Messages
from rljob.runner.prompts import Prompt


class TrajectoryError(Exception):
    """The trajectory cannot be finished; the message is recorded as the reason."""


class EpisodeContext(Protocol):
    """The episode of a trajectory in the environment of its task."""

    @property
    def limits(self) -> TaskEnvironment:
        """The task's ``environment`` in the manifest: the limits that a loop applies."""

    @property
    def max_tokens(self) -> int:
        """The task's sampling.maxTokens."""

    async def reset(self) -> Observation:
        """Start the episode, before the first turn. ``context.prompt`` is then the prompt with the first observation.

        Raises:
            TrajectoryError: the environment failed.
        """

    async def step(self, action: str) -> Observation:
        """Make the next step.

        Raises:
            TrajectoryError: the environment failed, lost the session, or the episode has ended.
        """

    def tokens(self, observation: str, answer: bytes) -> bytes:
        """Return the token ids (int32 bytes) to append after an answer: its end if it was cut, and the observation."""


@dataclass(frozen=True)
class AgentOutcome:
    """How an agent program ended. ``context``: that of the last answer, which may be a branch."""

    context: Context
    reward: float | None  # that it returned; None: no number
    completion: str  # the text that it returned, or its last answer
    finish: str  # of the last answer: stop | length
    turns: int
    context_limit: bool  # whether a call left no room for an answer
    forks: int  # calls that began a branch


class AgentContext(Protocol):
    """The agent program of a trajectory."""

    async def run(self) -> AgentOutcome:
        """Start the program, and answer its calls until it ends. Each call that is answered is a turn.

        Raises:
            TrajectoryError: the program failed, or made no call.
        """


class Context(Protocol):
    """One trajectory, driven by its loop."""

    @property
    def sample(self) -> str:
        """Id of the sample. It is the same when the loop runs again, so a seed can be derived from it."""

    @property
    def prompt(self) -> Prompt:
        """The prompt: ``token_ids`` (int32 bytes), ``text``, and ``problem``, the row of the task's data."""

    @property
    def episode(self) -> EpisodeContext:
        """The episode of the task's environment.

        Raises:
            TrajectoryError: the task has no environment.
        """

    @property
    def agent(self) -> AgentContext:
        """The agent program of the task.

        Raises:
            TrajectoryError: the task has no agent.
        """

    def branch(self) -> Context:
        """Return a context that continues from the present tokens: those of the last turn and before it. This context
        can continue too. Branches share prompt, episode and agent.

        Raises:
            TrajectoryError: a turn of this context is being generated, or branches are nested too deeply.
        """

    @property
    def room(self) -> int:
        """Tokens that fit into maxModelLength after the last turn: the next observation and answer together."""

    async def generate(self, token_ids: bytes, max_tokens: int | None = None, stop: Sequence[str] = ()) -> TurnTokens:
        """Generate the next turn.

        Args:
            token_ids: the whole context (int32 bytes). In the first turn, the input of the model; in each later turn,
                the previous context, its answer, and an observation, which may be empty.
            max_tokens: of this answer; the task's sampling.maxTokens also applies.
            stop: strings that end this answer, beside those of the task's sampling: at most 16, of 1 to 128
                characters.

        Returns:
            The answer: ``token_ids``, and ``finish``: stop (the model ended it) | length (it reached ``max_tokens``,
            the task's sampling.maxTokens, or maxModelLength).

        Raises:
            TrajectoryError: an argument is malformed, the context does not start with the previous turn, it leaves no
                room for an answer, or the turn was generated from another context before the runner died.
        """

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
        """Ask a frozen pool: an entry of spec.rollouts whose model is not policy. Several questions can be open at the
        same time, also while a turn is generated.

        The answer is recorded before this method returns it. If the loop runs again, equal arguments in the same branch
        give the recorded answer, without a request. If they occur several times, each call has an answer of its own.

        Args:
            pool: name of the pool.
            content: messages of a chat (``[{"role": "user", "content": …}]``), or a text that the model continues.
            max_tokens: of the answer, by the pool's tokenizer; None: the task's sampling.maxTokens.
            temperature: of the sampling; 0: greedy.
            top_p: of the sampling.
            stop: strings that end the answer, as in :meth:`generate`; they are not part of it.
            timeout_seconds: limit of an engine's work on the question; None: that of failurePolicy.stallSeconds. It is
                no part of what must be equal.

        Returns:
            The answer: ``text``, and ``finish``: stop (the model ended it) | length (it reached ``max_tokens``).

        Raises:
            TrajectoryError: an argument is malformed, the pool does not exist or serves the policy, an engine refuses
                the question, engines failed on it three times, or no engine of the pool has answered for
                failurePolicy.stallSeconds (for an hour, if none has answered at all). It is not recorded: a loop that
                runs again asks again.
        """

    def encode(self, text: str) -> bytes:
        """Return the token ids (int32 bytes) of an observation. Special tokens of the tokenizer in ``text`` are encoded
        as special tokens; no special token is added."""

    def decode(self, token_ids: bytes) -> str:
        """Return the text of token ids, without special tokens."""

    def answer(self, turn: TurnTokens) -> str:
        """Return the text of an answer without special tokens, and without the stop string (of the task's sampling or
        of the call of :meth:`generate`) that ended it, or with it if sampling.includeStop is set. Its token ids include
        the stop string."""

    def state(self, name: str) -> None:
        """Name the state of the environment before the next turn of this context, for an advantage that compares the
        steps of a group from equal states (`gigpo`). Equal names are equal states. A turn without one has no such
        advantage.

        Raises:
            TrajectoryError: ``name`` is not text.
        """

    def reward(self, value: float) -> None:
        """Add ``value`` to the sample's reward and credit it to the last generated turn.

        Raises:
            TrajectoryError: no turn has been generated, or ``value`` is not finite.
        """

    async def score(self, completion: str, finish: str) -> Score:
        """Return the score from the task's reward; without one, 0, to which the rewards of :meth:`reward` are added.

        The reward also receives the text of all turns of this context if there are several. A loop may return another
        score instead, made with ``Score(sample=context.sample, reward=…, turn_rewards=[…])``. Rewards of :meth:`reward`
        are added to it. ``turn_rewards`` are in the order of the turns; in a sample with branches first those of the
        first context, then branch by branch in the order of :func:`rljob.protocol.branches.order`.

        Args:
            completion: the answer to score.
            finish: stop | length.
        """
