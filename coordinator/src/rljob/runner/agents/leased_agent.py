"""The agent program of a leased trajectory: its session at the endpoint, and what it returned."""

from __future__ import annotations

import asyncio
import logging
import numbers
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from rljob.protocol.runner_protocol import LeaseTrajectory
from rljob.runner.agents.agent_command import AgentProcessError
from rljob.runner.agents.agent_endpoint import AgentEndpoint
from rljob.runner.agents.agent_program import AgentProgram
from rljob.runner.agents.agent_session import AgentSession
from rljob.runner.chat import ChatTemplate
from rljob.runner.context import AgentOutcome, Context, TrajectoryError
from rljob.runner.error_text import described_error
from rljob.runner.prompts import Encoder, Prompt
from rljob.runner.sample_seed import sample_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentRuntime:
    """What the agents of a task share."""

    program: AgentProgram
    endpoint: AgentEndpoint
    chat: ChatTemplate
    encoder: Encoder
    stop_token_ids: list[int]
    max_model_length: int  # tokens of the longest sequence that an engine accepts
    scored: bool  # a reward of the job scores the samples
    seed: int  # the job's


class LeasedAgent:
    """The program of one trajectory; implements :class:`rljob.runner.context.AgentContext`.

    A program that lost its runner begins again, in another runner, with another seed: it need not make the same calls,
    so the coordinator has discarded what was generated.

    Args:
        runtime: of the task.
        lease: the trajectory.
        context: the trajectory, which generates the turns.
        set_prompt: receives the first context of the model.
        pools: names of the frozen pools that the program may ask.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        lease: LeaseTrajectory,
        context: Context,
        set_prompt: Callable[[Prompt], None],
        pools: Collection[str] = (),
    ) -> None:
        self._runtime = runtime
        self._lease = lease
        self._row = context.prompt.problem
        self._set_prompt = set_prompt
        self._key = ""
        self._session = AgentSession(
            context, runtime.chat, runtime.encoder, runtime.stop_token_ids, runtime.max_model_length, self._begin, pools
        )

    async def run(self) -> AgentOutcome:
        """Start the program, and answer its calls until it ends."""
        if self._key:
            raise TrajectoryError("the loop runs its agent twice; a trajectory has one run of it")
        session, self._key = self._session, self._runtime.endpoint.begin(self._session)
        program = asyncio.create_task(self._play())
        failing = asyncio.create_task(session.failed.wait())
        try:
            await asyncio.wait({program, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.end()
            failing.cancel()
            program.cancel()  # it may ignore this, so nothing waits for it
        if session.failure:  # also if the program has caught the error of the call
            raise TrajectoryError(session.failure)
        result, error = program.result()
        if error:
            raise TrajectoryError(error)
        if not session.turns:
            cause = "its first call leaves no room in maxModelLength" if session.context_limit else "it made no call"
            raise TrajectoryError(f"its agent has no answer of the model: {cause}")
        return self._outcome(result)

    def end(self) -> None:
        """End the session: later calls of the program are refused. Without a session, do nothing."""
        if self._key:
            self._runtime.endpoint.end(self._key)

    async def _play(self) -> tuple[Any, str]:
        """Run the program; return its result, and the reason for which it failed, or an empty text."""
        try:
            result = await self._runtime.program.run(
                base_url=self._runtime.endpoint.url,
                api_key=self._key,
                row=self._row,
                seed=sample_seed(self._runtime.seed, self._lease),
            )
        except AgentProcessError as error:
            return None, str(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a program may raise anything; only its sample fails
            log.warning("the agent of sample %s failed", self._lease.sample, exc_info=True)
            return None, f"its agent raised {described_error(error)}"
        return result, ""

    def _begin(self, text: str, token_ids: bytes) -> None:
        self._set_prompt(Prompt(self._row, text, token_ids))

    def _outcome(self, result: Any) -> AgentOutcome:
        session = self._session
        if result is not None and not isinstance(result, str | numbers.Real):
            raise TrajectoryError(
                f"its agent returned a value of type {type(result).__name__}; return None, a number (the reward), or a "
                "text (scored by the task's reward)"
            )
        given = isinstance(result, numbers.Real)
        if not given and not self._runtime.scored:
            raise TrajectoryError(
                "its agent returned no reward, and its task has none; return a number, or name a reward in the task"
            )
        return AgentOutcome(
            context=cast(Context, session.last),
            reward=float(result) if isinstance(result, numbers.Real) else None,
            completion=result if isinstance(result, str) else session.completion,
            finish=session.finish,
            turns=session.turns,
            context_limit=session.context_limit,
            forks=session.forks,
        )
