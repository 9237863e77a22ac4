"""The questions of one leased trajectory to frozen pools.

An answer is stored by the coordinator before the loop gets it, with the digest of its question. A loop that runs again,
in another runner or after a restart of the coordinator, finds it by this digest, in whatever order it asks, and does
not ask the pool again.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import blake3

from rljob.protocol.runner_protocol import LeaseTrajectory, PoolAnswer, PoolAnswered
from rljob.runner.context import TrajectoryError
from rljob.runner.pools.question import Question
from rljob.runner.sample_seed import sample_seed

MOST_BYTES = 16 << 20
"""Texts of the answers of one sample: they are one message when the sample is leased again."""

Key: TypeAlias = tuple[str, str, int]
"""Branch, question and number of a PoolAnswer."""


class FrozenPool(Protocol):
    """Answers questions, as :class:`rljob.runner.pools.pool_client.PoolClient` does."""

    async def answer(self, question: Question, seed: int, seconds: float | None) -> tuple[str, str]:
        """Return the text of an answer and its finish."""

    async def logprobs(self, token_ids: bytes) -> Sequence[float]:
        """Return the log-probability of each of some tokens (int32), given those before it; of the first one 0."""


@dataclass(frozen=True)
class PoolRuntime:
    """The pools of a job, for all trajectories."""

    frozen: Mapping[str, FrozenPool] = field(default_factory=dict)  # by name
    policy: Collection[str] = ()  # names of the pools that serve the policy
    seed: int = 0  # the job's
    roles: Mapping[str, str] = field(default_factory=dict)  # reference | teachers[0] … → its pool, of the task


NO_POOLS = PoolRuntime()


class LeasedQuestions:
    """The questions of one trajectory; see :meth:`rljob.runner.context.Context.ask`.

    Args:
        runtime: the pools.
        lease: the trajectory.
        send: sends a message to the coordinator.
        in_call: entered while a question is open.
    """

    def __init__(
        self,
        runtime: PoolRuntime,
        lease: LeaseTrajectory,
        send: Callable[[PoolAnswered], None],
        in_call: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._runtime = runtime
        self._lease = lease
        self._send = send
        self._in_call = in_call
        self._recorded: dict[Key, PoolAnswer] = {_key(answer): answer for answer in lease.answers}
        self._numbers: dict[tuple[str, str], set[int]] = {}  # branch and question → of calls that have not failed
        self._open: set[asyncio.Task[PoolAnswer]] = set()
        self._unstored: dict[Key, PoolAnswered] = {}
        self._stored: dict[Key, asyncio.Future[PoolAnswer]] = {}
        self._bytes = sum(len(answer.text) for answer in lease.answers)
        self._ended = False

    @property
    def pending(self) -> list[PoolAnswered]:
        """The messages to send again after a reconnect."""
        return [*self._unstored.values()]

    async def ask(
        self,
        branch: str,
        turn: int,
        question: Question,
        seconds: float | None,
    ) -> PoolAnswer:
        """Return the recorded answer, or ask. ``branch``, ``turn``: as in :class:`PoolAnswer`. ``seconds``: as in
        :meth:`FrozenPool.answer`.

        Raises:
            TrajectoryError: there is no such pool, or it gives no answer.
        """
        self._check_pool(question.pool)
        if seconds is not None and not seconds > 0:
            raise TrajectoryError(
                f"the loop asks pool {question.pool} with timeout_seconds {seconds}; it must be above 0"
            )
        digest = question.digest
        numbers = self._numbers.setdefault((branch, digest), set())
        number = next(number for number in itertools.count() if number not in numbers)
        numbers.add(number)
        recorded = self._recorded.get((branch, digest, number))
        if recorded is not None:
            return recorded
        asking = asyncio.create_task(self._ask((branch, digest, number), turn, question, seconds))
        self._open.add(asking)
        asking.add_done_callback(self._open.discard)
        try:
            return await asking
        except BaseException:  # re-raised; if the loop asks again, the answer has the number of the first call
            numbers.discard(number)
            raise

    def receive(self, answer: PoolAnswer) -> None:
        """Accept an answer that the coordinator has stored; one that no call waits for is ignored."""
        stored = self._stored.get(_key(answer))
        if stored is not None and not stored.done():
            stored.set_result(answer)

    def end(self) -> None:
        """Cancel open questions, which tasks of the loop may have left behind."""
        self._ended, self._in_call = True, nullcontext  # the trajectory and its questions are no cycle any more
        for asking in self._open:
            asking.cancel()

    def _check_pool(self, name: str) -> None:
        if self._ended:
            raise TrajectoryError(f"the loop asks pool {name} after the end of its trajectory")
        if name in self._runtime.policy:
            raise TrajectoryError(
                f"the loop asks pool {name}, which serves the policy; name an entry of spec.rollouts whose model is "
                "not policy, or call generate"
            )
        if name not in self._runtime.frozen:
            known = ", ".join(self._runtime.frozen)
            there_are = f"there are {known}" if known else "there is none"
            raise TrajectoryError(
                f"the loop asks pool {name!r}, which is no entry of spec.rollouts with a model of its own; {there_are}"
            )

    async def _ask(self, key: Key, turn: int, question: Question, seconds: float | None) -> PoolAnswer:
        with self._in_call():
            text, finish = await self._runtime.frozen[question.pool].answer(question, self._seed_of(key), seconds)
            self._bytes += len(text)
            if self._bytes > MOST_BYTES:
                raise TrajectoryError(
                    f"the answers of pools to the loop have more than {MOST_BYTES:,} characters; ask for fewer tokens"
                )
            answered = PoolAnswered(
                self._lease.sample,
                PoolAnswer(*key, turn, question.pool, text, finish),
                self._lease.attempt,
                self._lease.lease,
            )
            stored: asyncio.Future[PoolAnswer] = asyncio.get_running_loop().create_future()
            self._stored[key] = stored
            self._unstored[key] = answered
            self._send(answered)
            try:
                return await stored
            finally:
                self._unstored.pop(key, None)
                self._stored.pop(key, None)

    def _seed_of(self, key: Key) -> int:
        branch, question, number = key
        of_sample = struct.pack("<QQ", sample_seed(self._runtime.seed, self._lease), number)
        return int.from_bytes(blake3.blake3(of_sample + f"{question}/{branch}".encode()).digest(8), "little") >> 12


def _key(answer: PoolAnswer) -> Key:
    return answer.branch, answer.question, answer.number
