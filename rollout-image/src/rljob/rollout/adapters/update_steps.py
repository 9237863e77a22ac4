"""The steps of a weight update after the engine has joined the group: pause, receive, resume, score the probe.

:func:`carry_out` calls the methods of :class:`~rljob.rollout.adapters.base.EngineClient` one after the other, or
``update_in_one_call`` of a client that has it (:class:`UpdatesInOneCall`). Both begin a step only after the one before
it succeeded, and both name the step that failed: the weight updater must know whether the weights may be a mixture.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rljob.protocol.agent_protocol import PrepareWeights
from rljob.rollout.adapters.base import EngineClient, EngineError, EngineGoneError, engine_errors

PAUSE, RECEIVE, RESUME, SCORE = "pause", "receive", "resume", "score"


class StepError(EngineGoneError):
    """A step of an update failed. The steps before it succeeded, those after it did not begin.

    Args:
        step: PAUSE, RECEIVE, RESUME or SCORE.
        reason: of the failure.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(reason)
        self.step = step


@dataclass(frozen=True)
class UpdateOutput:
    """What an update of the weights gave.

    Args:
        digest: of the weights; see ``EngineClient.receive``.
        scores: of the probe's sequences, in their order; see ``EngineClient.score``.
        seconds: of each step, by its name.
    """

    digest: str
    scores: list[list[float]]
    seconds: Mapping[str, float]


@runtime_checkable
class UpdatesInOneCall(Protocol):
    """The part of an engine's client whose server carries out the steps by itself. Optional."""

    async def update_in_one_call(self, update: PrepareWeights, seconds: float) -> UpdateOutput:
        """Carry out the steps, with the guarantees of the methods of ``EngineClient`` of the same names.

        Once the agent has cancelled the call, the server begins no step: an engine whose update the agent gave up
        stays paused, and no step of it meets those of the next update.

        Args:
            update: as for ``EngineClient.receive``; also ``in_flight``, and the ``probe``, which may be empty.
            seconds: time limit of pause and receive together.

        Raises:
            StepError: a step failed.
            EngineGoneError: the server did not answer, so any step may have been the last.
        """


async def carry_out(engine: EngineClient, update: PrepareWeights, seconds: float) -> UpdateOutput:
    """Carry out the steps of ``update``. The engine has joined its group.

    Args:
        engine: client of the engine.
        update: what to receive, the treatment of requests in flight, and the probe, which may be empty.
        seconds: time limit of pause and receive together.

    Raises:
        StepError: a step failed.
        EngineGoneError: the server did not answer, so any step may have been the last.
    """
    if isinstance(engine, UpdatesInOneCall):
        with engine_errors():
            return await engine.update_in_one_call(update, seconds)
    took: dict[str, float] = {}
    deadline = time.monotonic() + seconds
    with _step(PAUSE, took, update):
        async with asyncio.timeout(seconds):
            await engine.pause(update.in_flight)
    with _step(RECEIVE, took, update):
        digest = await engine.receive(update, deadline - time.monotonic())
    with _step(RESUME, took, update):
        await engine.resume()
    with _step(SCORE, took, update):
        scores = await asyncio.gather(*(engine.score(sequence) for sequence in update.probe.token_ids))
    return UpdateOutput(digest, scores, took)


@contextmanager
def _step(name: str, took: dict[str, float], update: PrepareWeights) -> Iterator[None]:
    started = time.monotonic()
    try:
        with engine_errors():
            try:
                yield
            except TimeoutError:
                raise EngineError(f"it took longer than {update.timeout_seconds:g} s") from None
    except EngineError as error:
        raise StepError(name, str(error)) from error
    took[name] = time.monotonic() - started
