"""Client of a vLLM server.

Uses vLLM's /inference/v1/generate (token ids in; token ids, log-probabilities and weight versions out), the routes of
its development mode that join a weight group and resume, and those of
:mod:`rljob.rollout.adapters.vllm.update_routes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rljob.protocol.messages import PrepareWeights, SamplingParams, VersionSpan
from rljob.rollout.adapters.base import INITIAL_VERSION, EngineError, GenerationOutput, unpack_ints
from rljob.rollout.adapters.http_client import EngineHttp
from rljob.rollout.adapters.vllm.update_routes import PAUSE, RECEIVE, Pause, Receive, Received

GENERATE = "/inference/v1/generate"
PAUSE_MODES = {  # inFlight → (vLLM's mode, whether vLLM clears the KV cache)
    "keep": ("keep", True),
    "keepStaleCache": ("keep", False),
    "abort": ("abort", True),
    "wait": ("wait", True),
}


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _WeightVersion(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs
    weight_versions: list[_WeightVersion] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _ScoreReply(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None]


_reply = msgspec.json.Decoder(_Reply)
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
        self._version = "default"  # vLLM's label of the initial weights

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def healthy(self) -> bool:
        """Return whether the server is up and its engine alive."""
        return await self._http.answers("/health")

    async def responsive(self) -> bool:
        """Return True once the engine itself has answered; False if it is dead."""
        return await self._http.answers("/is_paused")

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> GenerationOutput:
        """Generate one completion."""
        body = {
            "request_id": request,
            "token_ids": unpack_ints(token_ids),
            "cache_salt": self._version,  # new requests must not use cached prefixes of older weights
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": sampling.stop_token_ids,
                "ignore_eos": True,  # stop_token_ids are complete
                "seed": sampling.seed,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        choice = (await self._http.call(GENERATE, body, _reply)).choices[0]
        return GenerationOutput.pack(
            choice.token_ids,
            [entry.logprob for entry in choice.logprobs.content],
            [
                VersionSpan(_labelled_version(each.version), each.start, each.end)
                for each in choice.weight_versions or ()
            ],
            choice.finish_reason,
        )

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop requests; vLLM adds a prefix to the names of requests on this route."""
        body = {"request_ids": [f"generate-tokens-{request}" for request in requests]}
        await self._http.post("/inference/v1/abort_requests", body)

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
        await self._http.post("/init_weight_transfer_engine", {"init_info": info})

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
        reply = await self._http.call(GENERATE, body, _score_reply)
        positions = zip(token_ids, reply.prompt_logprobs, strict=True)
        return [entry[str(token)].logprob for token, entry in positions if entry is not None]


def _version_label(update: PrepareWeights) -> str:
    """Return the label under which vLLM serves the weights of ``update``."""
    return f"{update.lineage}.{update.version}"


def _labelled_version(label: str) -> int:
    """Return the policy version of a :func:`_version_label`; INITIAL_VERSION for any other label."""
    number = label.rpartition(".")[2]
    return int(number) if number.isdigit() else INITIAL_VERSION
