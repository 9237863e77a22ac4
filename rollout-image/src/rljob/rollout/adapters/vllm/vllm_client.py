"""Client of a vLLM server.

Uses :mod:`rljob.rollout.adapters.vllm.generation_stream` and the routes of
:mod:`rljob.rollout.adapters.vllm.update_routes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout.adapters.base import GenerationOutput
from rljob.rollout.adapters.http_client import EngineHttp
from rljob.rollout.adapters.update_steps import StepError, UpdateOutput
from rljob.rollout.adapters.version_label import labelled_version, version_label
from rljob.rollout.adapters.vllm.generation_stream import GENERATE, GenerationStream, StreamRequest
from rljob.rollout.adapters.vllm.update_routes import JOIN, UPDATE, Pause, Receive, Steps, StepsDone

PAUSE_MODES = {  # inFlight → (vLLM's mode, whether vLLM clears the KV cache)
    "keep": ("keep", True),
    "keepStaleCache": ("keep", False),
    "abort": ("abort", True),
    "wait": ("wait", True),
}


_steps_done = msgspec.json.Decoder(StepsDone)


class VllmClient:
    """A running vLLM server; see :class:`~rljob.rollout.adapters.base.EngineClient`. Needs a running event loop.

    Args:
        url: of the server, without a trailing slash.
        key: of this start of the server.
    """

    def __init__(self, url: str, key: str) -> None:
        self._http = EngineHttp("vLLM", url, key)
        self._stream = GenerationStream(lambda: self._http.connect(GENERATE))
        self._version = "default"  # vLLM's label of the initial weights

    async def close(self) -> None:
        """Close all connections."""
        await self._stream.close()
        await self._http.close()

    async def healthy(self) -> bool:
        """Return whether the server is up and its engine alive."""
        return await self._http.answers("/health")

    async def responsive(self) -> bool:
        """Return True once the engine itself has answered; False if it is dead."""
        return await self._http.answers("/is_paused")

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> GenerationOutput:
        """Generate one completion."""
        output = await self._stream.generate(
            StreamRequest(
                request,
                token_ids,
                self._version,  # new requests must not use cached prefixes of older weights
                sampling,
            )
        )
        spans = [VersionSpan(labelled_version(label), start, end) for label, start, end in output.versions]
        return GenerationOutput(output.token_ids, output.logprobs, spans, output.finish)

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop requests."""
        await self._stream.abort(requests)

    async def join(self, update: PrepareWeights, seconds: float) -> None:
        """Join the update's weight group; the receiver leaves the previous group."""
        info = {
            "transport": update.transport,
            "group": update.group,
            "address": update.address,
            "port": update.port,
            "world_size": update.world_size,
            "bucket_bytes": update.bucket_bytes,
            "timeout_seconds": seconds,
        }
        await self._http.post(JOIN, info)

    async def pause(self, in_flight: str) -> None:
        """Stop generating."""
        await self._carry_out(Steps(pause=Pause(*PAUSE_MODES[in_flight])))

    async def receive(self, update: PrepareWeights, seconds: float) -> str:
        """Receive, load and commit the update's weights; return their digest."""
        done = await self._carry_out(Steps(receive=_receive_step(update), seconds=seconds))
        return done.digest

    async def resume(self) -> None:
        """Continue generating."""
        await self._carry_out(Steps(resume=True))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""
        done = await self._carry_out(Steps(score=[list(token_ids)]))
        return done.scores[0]

    async def update_in_one_call(self, update: PrepareWeights, seconds: float) -> UpdateOutput:
        """Pause, receive, resume, and score the probe; see
        :class:`~rljob.rollout.adapters.update_steps.UpdatesInOneCall`."""
        pause, receive = Pause(*PAUSE_MODES[update.in_flight]), _receive_step(update)
        done = await self._carry_out(Steps(pause, receive, True, update.probe.token_ids, seconds))
        return UpdateOutput(done.digest, done.scores, done.seconds)

    async def _carry_out(self, steps: Steps) -> StepsDone:
        done = await self._http.call(UPDATE, steps, _steps_done)
        if steps.receive is not None and done.digest:
            self._version = steps.receive.weight_version
        if done.failed:
            raise StepError(done.failed, f"vLLM failed to {done.failed}: {done.error}")
        return done


def _receive_step(update: PrepareWeights) -> Receive:
    info = {
        "names": [meta.name for meta in update.parameters],
        "dtypes": [meta.dtype for meta in update.parameters],
        "shapes": [meta.shape for meta in update.parameters],
    }
    return Receive(info, version_label(update))
