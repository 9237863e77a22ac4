"""What a loop sees of its trajectory."""

from __future__ import annotations

from typing import Protocol

from rljob.protocol.messages import TurnTokens
from rljob.protocol.rewards import Score
from rljob.runner.prompts import Prompt


class TrajectoryError(Exception):
    """The trajectory cannot be finished; the message is the reason that is recorded."""


class Context(Protocol):
    """One trajectory as its loop drives it. A loop that runs again (its runner died) must make the same calls: turns
    that exist already are answered from what the coordinator kept."""

    @property
    def prompt(self) -> Prompt:
        """The row's prompt."""

    async def generate(self, token_ids: bytes) -> TurnTokens:
        """Generate the next turn from its whole context (int32).

        Raises:
            TrajectoryError: the context leaves no room for an answer, or is not the one a kept turn was made from.
        """

    def decode(self, token_ids: bytes) -> str:
        """Return the text of generated token ids, special tokens left out."""

    async def score(self, completion: str, finish: str) -> Score:
        """Have the answer scored by the task's reward; ``finish`` is stop | length."""
