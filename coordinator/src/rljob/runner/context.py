"""The interface of a loop: the trajectory that a loop drives.

A loop is an async function with one argument, the :class:`Context` of a trajectory. It returns the sample's score:

    async def guess_twice(context: Context) -> Score:
        first = await context.generate(context.prompt.token_ids)
        observation = context.encode("\\nWrong. Try again.\\n")
        second = await context.generate(context.prompt.token_ids + first.token_ids + observation)
        return await context.score(context.decode(second.token_ids), second.finish)

A context is a concatenation of token ids. Tokens of the model are never decoded and encoded again: the context of each
turn starts with the context and the answer of the previous turn. The tokens added after them are the observation.

If a runner dies, the loop runs again in another runner, and turns that were generated before are replayed from the
ledger. A loop must therefore make the same calls again: it depends on its context alone, not on a clock or on unseeded
random numbers. An exception of a loop fails its sample, not the run.
"""

from __future__ import annotations

from typing import Protocol

from rljob.protocol.messages import TurnTokens
from rljob.protocol.score_messages import Score
from rljob.runner.prompts import Prompt


class TrajectoryError(Exception):
    """The trajectory cannot be finished; the message is recorded as the reason."""


class Context(Protocol):
    """One trajectory, driven by its loop."""

    @property
    def sample(self) -> str:
        """Id of the sample. It is the same when the loop runs again, so a seed can be derived from it."""

    @property
    def prompt(self) -> Prompt:
        """The prompt: ``token_ids`` (int32 bytes), ``text``, and ``problem``, the row of the task's data."""

    @property
    def room(self) -> int:
        """Tokens that fit into maxModelLength after the last turn: the next observation and answer together."""

    async def generate(self, token_ids: bytes) -> TurnTokens:
        """Generate the next turn.

        Args:
            token_ids: the whole context (int32 bytes). In the first turn, the input of the model; in each later turn,
                the previous context, its answer, and an observation, which may be empty.

        Returns:
            The answer: ``token_ids``, and ``finish``: stop (the model ended it) | length (it reached the task's
            sampling.maxTokens, or maxModelLength).

        Raises:
            TrajectoryError: the context does not start with the previous turn, it leaves no room for an answer, or the
                turn was generated from another context before the runner died.
        """

    def encode(self, text: str) -> bytes:
        """Return the token ids (int32 bytes) of an observation. Special tokens of the tokenizer in ``text`` are encoded
        as special tokens; no special token is added."""

    def decode(self, token_ids: bytes) -> str:
        """Return the text of token ids, without special tokens."""

    def reward(self, value: float) -> None:
        """Add ``value`` to the sample's reward and credit it to the last generated turn.

        Raises:
            TrajectoryError: no turn has been generated, or ``value`` is not finite.
        """

    async def score(self, completion: str, finish: str) -> Score:
        """Return the score from the task's reward.

        The reward also receives the text of all turns if there are several. A loop may return another score instead,
        made with ``Score(sample=context.sample, reward=…, turn_rewards=[…])``. Rewards of :meth:`reward` are added to
        it.

        Args:
            completion: the answer to score.
            finish: stop | length.
        """
