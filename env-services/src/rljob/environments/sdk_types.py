"""The interface of an environment, in the manner of Gymnasium, over text.

    class Guess:
        def reset(self, seed, row):
            self.number = random.Random(seed).randrange(10)
            return "Guess a number from 0 to 9.", {}

        def step(self, action):
            right = action.strip() == str(self.number)
            return "Right." if right else "Wrong, again.", float(right), right, False, {"metrics": {"success": right}}

The service makes one object for each episode: it calls ``reset`` once and ``step`` until the episode is terminated or
truncated, then ``close`` if the class has it. ``seed`` differs between the samples of a group, ``row`` (of the task's
data) does not: what the prompt shows should depend on ``row``, and chance during the episode on ``seed``. An episode
must depend on nothing else, because a run that is resumed plays it again.

``reset`` returns an observation and an info, ``step`` an observation, a reward, terminated, truncated and an info.
Of ``info`` only ``metrics`` (name → number) counts: the last value of a metric is the sample's. A metric that
``metrics_agg_mode`` (name → ``mean`` or ``last``) calls ``mean`` is the mean over the steps. An action is the text of
the model, and may be anything; an exception fails the sample.

Functions may be async; then they share one event loop and must not block it. Others run in threads, unless the class
has ``in_event_loop = True``, which promises that they take microseconds. ``actions`` (a list of texts) and ``expert()``
(the best action now) are optional: `rljob env check` plays random and scripted episodes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

Info: TypeAlias = Mapping[str, Any]
StepResult: TypeAlias = tuple[str, float, bool, bool, Info]


class TextEnvironment(Protocol):
    """One episode; see the module. Both functions may be async."""

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Info]:
        """Start the episode; return the first observation."""

    def step(self, action: str) -> StepResult:
        """Make one step."""


class EpisodeError(Exception):
    """The environment cannot continue an episode; the message names the environment and the cause.

    ``hung``: a call took longer than its limit, and may still run.
    """

    def __init__(self, message: str, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung
