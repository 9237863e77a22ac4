"""One weight update of the engine, from PrepareWeights to WeightAck or WeightFailed.

Invariant: an engine whose weights may be a mixture never generates. The engine is *tainted* from the moment that
loading begins until an update is committed; a failure in between leaves it paused, for another update or a restart.

Order: join the group (the sender waits for it), pause, receive and commit, resume, probe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import chain

from rljob.protocol.messages import PrepareWeights, Probe, WeightAck
from rljob.rollout.adapters.base import EngineClient, EngineError, engine_errors

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""The engine ends an update at its deadline; this is the additional time for its answer."""


class UpdateError(Exception):
    """The update did not commit."""


class WeightUpdater:
    """Updates of one engine server."""

    def __init__(self, engine: EngineClient) -> None:
        self.tainted = False
        self._engine = engine
        self._group = ""

    async def run(self, update: PrepareWeights) -> WeightAck:
        """Carry out ``update``.

        Raises:
            UpdateError: the update did not commit. The engine is paused if it is tainted; otherwise it generates as
                before.
        """
        start = time.monotonic()
        deadline = start + update.timeout_seconds
        try:
            async with asyncio.timeout(update.timeout_seconds + GRACE_SECONDS):
                digest = await self._commit(update, deadline)
                with engine_errors():
                    await self._engine.resume()
                largest, mean = await self._probe(update.probe)
        except TimeoutError:
            await self._resume_unless_tainted()
            raise UpdateError(f"it took longer than {update.timeout_seconds:g} s") from None
        except EngineError as error:
            await self._resume_unless_tainted()
            raise UpdateError(str(error)) from None
        seconds = time.monotonic() - start
        log.info("weights of version %d received in %.3f s, probe error %.2g", update.version, seconds, largest)
        return WeightAck(update.update, update.lineage, update.version, digest, largest, mean, seconds)

    async def _commit(self, update: PrepareWeights, deadline: float) -> str:
        """Return the digest of the weights that the engine received."""
        if self._group != update.group:
            self._group = ""
            with engine_errors():
                await self._engine.join(update, deadline - time.monotonic())
            self._group = update.group
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
            with engine_errors():
                await self._engine.pause(update.in_flight)
        self.tainted = True
        try:
            with engine_errors():
                digest = await self._engine.receive(update, deadline - time.monotonic())
        except EngineError:
            self._group = ""  # the receiver has left it
            raise
        self.tainted = False
        return digest

    async def _probe(self, probe: Probe) -> tuple[float, float]:
        """Return the largest and the mean difference of the trainer's log-probabilities and the engine's, in nats;
        -1 without a probe."""
        if not probe.token_ids:
            return -1.0, -1.0
        with engine_errors():
            scores = await asyncio.gather(*(self._engine.score(sequence) for sequence in probe.token_ids))
        if [len(ours) for ours in scores] != [len(theirs) for theirs in probe.logprobs]:
            raise UpdateError("the probe's sequences and log-probabilities differ in length")
        pairs = zip(chain.from_iterable(scores), chain.from_iterable(probe.logprobs), strict=True)
        differences = [abs(ours - theirs) for ours, theirs in pairs]
        return max(differences, default=0.0), sum(differences) / max(1, len(differences))

    async def _resume_unless_tainted(self) -> None:
        if self.tainted:
            return
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                with engine_errors():
                    await self._engine.resume()
        except (EngineError, TimeoutError):
            log.warning("the engine did not resume after a failed update")
