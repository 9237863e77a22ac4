"""One weight update of the engine, from PrepareWeights to WeightAck or WeightFailed.

Invariant: an engine whose weights may be a mixture never generates. The engine is *tainted* while an update is carried
out, and afterwards if it may have begun to load and did not commit: then it stays paused, for another update or a
restart. That holds also if the engine does not answer and the agent cannot know the step.

Order: join the group (the sender waits for it), then the steps of :mod:`rljob.rollout.adapters.update_steps`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from itertools import chain

from rljob.protocol.agent_protocol import PrepareWeights, WeightAck
from rljob.protocol.shared_messages import Probe
from rljob.rollout.adapters.base import EngineClient, EngineError, engine_errors
from rljob.rollout.adapters.update_steps import PAUSE, RECEIVE, RESUME, SCORE, StepError, UpdateOutput, carry_out

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""The engine ends an update at its deadline; this is the additional time for its answer."""


class UpdateError(Exception):
    """The update did not commit."""


class WeightUpdater:
    """Updates of one engine server.

    Attributes:
        tainted: see above.
        seconds: of each step of the last update that succeeded, by its name.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.tainted = False
        self.seconds: Mapping[str, float] = {}
        self._engine = engine
        self._group = ""

    async def run(self, update: PrepareWeights) -> WeightAck:
        """Carry out ``update``.

        Raises:
            UpdateError: the update did not commit. The engine is paused if it is tainted; otherwise it generates as
                before.
        """
        start = time.monotonic()
        try:
            async with asyncio.timeout(update.timeout_seconds + GRACE_SECONDS):
                await self._join(update)
                done = await self._carry_out(update, start + update.timeout_seconds - time.monotonic())
        except TimeoutError:
            await self._resume_unless_tainted()
            raise UpdateError(f"it took longer than {update.timeout_seconds:g} s") from None
        except EngineError as error:
            await self._resume_unless_tainted()
            raise UpdateError(str(error)) from None
        returned = time.monotonic()
        largest, mean = _differences(done.scores, update.probe)
        ended = time.monotonic()
        seconds = ended - start
        steps = ", ".join(f"{name} {took:.3f}" for name, took in done.seconds.items())
        log.info(
            "weights of version %d received in %.3f s (%s), probe error %.2g", update.version, seconds, steps, largest
        )
        self.seconds = done.seconds
        pause = sum(done.seconds.get(step, 0.0) for step in (PAUSE, RECEIVE, RESUME))
        since_resume = done.seconds.get(SCORE, 0.0) + ended - returned
        return WeightAck(
            update.update, update.lineage, update.version, done.digest, largest, mean, seconds, pause, since_resume
        )

    async def _join(self, update: PrepareWeights) -> None:
        """Join the group of ``update``, unless the engine is in it."""
        if self._group == update.group:
            return
        self._group = ""
        with engine_errors():
            await self._engine.join(update, update.timeout_seconds)
        self._group = update.group

    async def _carry_out(self, update: PrepareWeights, seconds: float) -> UpdateOutput:
        """Pause, receive and commit, resume, score. The engine counts as tainted until it says which step failed."""
        tainted, self.tainted = self.tainted, True
        group, self._group = self._group, ""  # the receiver leaves it if it fails
        try:
            done = await carry_out(self._engine, update, seconds)
        except StepError as error:
            if error.step != RECEIVE:
                self._group = group
                self.tainted = tainted and error.step == PAUSE
            raise
        self.tainted, self._group = False, group
        return done

    async def _resume_unless_tainted(self) -> None:
        if self.tainted:
            return
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                with engine_errors():
                    await self._engine.resume()
        except (EngineError, TimeoutError):
            log.warning("the engine did not resume after a failed update")


def _differences(scores: list[list[float]], probe: Probe) -> tuple[float, float]:
    """Return the largest and the mean difference of the engine's log-probabilities and the trainer's, in nats; -1
    without a probe.

    Raises:
        UpdateError: they are not of the same tokens.
    """
    if not probe.token_ids:
        return -1.0, -1.0
    if [len(ours) for ours in scores] != [len(theirs) for theirs in probe.logprobs]:
        raise UpdateError("the probe's sequences and log-probabilities differ in length")
    pairs = zip(chain.from_iterable(scores), chain.from_iterable(probe.logprobs), strict=True)
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    return max(differences, default=0.0), sum(differences) / max(1, len(differences))
