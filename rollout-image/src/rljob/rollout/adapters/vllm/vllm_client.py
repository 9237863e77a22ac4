"""Client of a vLLM server.

Uses :mod:`rljob.rollout.adapters.vllm.generation_stream`, the routes of
:mod:`rljob.rollout.adapters.vllm.update_routes`, /resume of vLLM's development mode, and /inference/v1/generate for the
log-probabilities of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rljob.protocol.messages import PrepareWeights, SamplingParams, VersionSpan
from rljob.rollout.adapters.base import INITIAL_VERSION, EngineError, GenerationOutput
from rljob.rollout.adapters.http_client import EngineHttp
from rljob.rollout.adapters.vllm.generation_stream import GENERATE, GenerationStream, StreamRequest
from rljob.rollout.adapters.vllm.update_routes import JOIN, PAUSE, RECEIVE, Pause, Receive, Received

SCORE = "/inference/v1/generate"
PAUSE_MODES = {  # inFlight → (vLLM's mode, whether vLLM clears the KV cache)
    "keep": ("keep", True),
    "keepStaleCache": ("keep", False),
    "abort": ("abort", True),
    "wait": ("wait", True),
}


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _ScoreReply(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None]


_score_reply = msgspec.json.Decoder(_ScoreReply)
_received = msgspec.json.Decoder(Received)


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
                sampling.temperature,
                sampling.max_tokens,
                sampling.stop_token_ids,
                sampling.seed,
            )
        )
        spans = [VersionSpan(_labelled_version(label), start, end) for label, start, end in output.versions]
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
        mode, clear = PAUSE_MODES[in_flight]
        await self._http.post(PAUSE, Pause(mode, clear))

    async def receive(self, update: PrepareWeights, seconds: float) -> str:
        """Receive, load and commit the update's weights; return their digest."""
        info = {
            "names": [meta.name for meta in update.parameters],
            "dtypes": [meta.dtype for meta in update.parameters],
            "shapes": [meta.shape for meta in update.parameters],
            "timeout_seconds": seconds,
        }
        version = _version_label(update)
        reply = await self._http.call(RECEIVE, Receive(info, version), _received)
        self._version = version
        digests = set(reply.digests)
        if len(digests) != 1:
            raise EngineError("the engine's workers received different weights")
        return digests.pop()

    async def resume(self) -> None:
        """Continue generating."""
        await self._http.post("/resume")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        reply = await self._http.call(SCORE, body, _score_reply)
        positions = zip(token_ids, reply.prompt_logprobs, strict=True)
        return [entry[str(token)].logprob for token, entry in positions if entry is not None]


def _version_label(update: PrepareWeights) -> str:
    """Return the label under which vLLM serves the weights of ``update``."""
    return f"{update.lineage}.{update.version}"


def _labelled_version(label: str) -> int:
    """Return the policy version of a :func:`_version_label`; INITIAL_VERSION for any other label."""
    number = label.rpartition(".")[2]
    return int(number) if number.isdigit() else INITIAL_VERSION
