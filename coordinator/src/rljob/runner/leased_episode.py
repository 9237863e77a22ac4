"""The environment of a leased trajectory: its episode, the first observation as prompt, later ones as tokens."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rljob.api.tasks import TaskEnvironment
from rljob.protocol.episode_messages import Observation, OpenSession
from rljob.protocol.runner_protocol import LeaseTrajectory
from rljob.runner.context import TrajectoryError
from rljob.runner.conversation import Conversation
from rljob.runner.environment_client import EnvironmentClient
from rljob.runner.prompts import Prompt, PromptMaker
from rljob.runner.sample_seed import sample_seed


@dataclass(frozen=True)
class EnvironmentRuntime:
    """What the episodes of a task share."""

    limits: TaskEnvironment
    max_tokens: int  # of an answer
    client: EnvironmentClient
    conversation: Conversation
    maker: PromptMaker
    seed: int  # the job's


class LeasedEpisode:
    """The episode of one trajectory; implements :class:`rljob.runner.context.EpisodeContext`.

    A loop that runs again, in another runner, plays the episode again in a session of its own: seed, row and actions
    are the same.

    Args:
        runtime: of the task.
        lease: the trajectory.
        prompt: the row; the prompt of the first observation takes its place.
        set_prompt: receives that prompt.
        in_call: entered while a request is in progress.
    """

    def __init__(
        self,
        runtime: EnvironmentRuntime,
        lease: LeaseTrajectory,
        prompt: Prompt,
        set_prompt: Callable[[Prompt], None],
        in_call: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._runtime = runtime
        self._lease = lease
        self._seed = sample_seed(runtime.seed, lease)
        self._row = prompt.problem
        self._set_prompt = set_prompt
        self._in_call = in_call
        self._session = ""
        self._last: Observation | None = None

    @property
    def limits(self) -> TaskEnvironment:
        """Limits of the episode."""
        return self._runtime.limits

    @property
    def max_tokens(self) -> int:
        """Longest answer, in tokens."""
        return self._runtime.max_tokens

    async def reset(self) -> Observation:
        """Start the episode."""
        if self._session:
            raise TrajectoryError("the loop resets its episode twice; a trajectory has one episode")
        self._session = f"{self._lease.sample}-{uuid.uuid4().hex}"
        with self._in_call():
            self._last = await self._runtime.client.open(OpenSession(self._session, self._seed, self._row))
        try:
            self._set_prompt(self._runtime.maker.make(self._lease.task, self._row, self._last.observation))
        except ValueError as error:
            raise TrajectoryError(str(error)) from error
        return self._last

    async def step(self, action: str) -> Observation:
        """Make the next step."""
        if self._last is None:
            raise TrajectoryError("the loop makes a step before it resets its episode")
        if self._last.ended:
            raise TrajectoryError(f"the loop makes a step after its episode ended at step {self._last.step}")
        with self._in_call():
            self._last = await self._runtime.client.step(self._session, self._last.step + 1, action)
        return self._last

    def tokens(self, observation: str, answer: bytes) -> bytes:
        """Return the token ids that follow an answer."""
        try:
            return self._runtime.conversation.follow(self._row, observation, answer)
        except ValueError as error:
            raise TrajectoryError(str(error)) from error

    def end(self) -> None:
        """End the session; without one, do nothing."""
        if self._session:
            self._runtime.client.end(self._session)
