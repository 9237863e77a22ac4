"""vLLM: how its server is started and spoken to.

Uses its native routes: /inference/v1/generate (token ids in; token ids, log-probabilities and weight versions out) and
those of its development mode for pausing and changing weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from rljob.api.roles import Rollout
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.messages import PrepareWeights, SamplingParams, VersionSpan
from rljob.rollout.adapters.base import BadRequestError, EngineError, EngineGoneError, Launch, Output
from rljob.rollout.exit_diagnosis import first_error
from rljob.rollout.vllm_engine.server_key import KEY_VARIABLE, RequireVllmKey

ENGINE_MODULE = "rljob.rollout.vllm_engine"
SERVED_NAME = "model"
PROBE_SLOTS = 8  # sequences beyond the pool's concurrency, so that a probe never waits for a slot
CPU_CACHE_BYTES = 256 << 20
CPU_STEP_TOKENS = 8192
CLIENT_KEEPS_ALIVE_SECONDS = 600
SERVER_KEEPS_ALIVE_SECONDS = 3600  # longer than the client, or a request may meet a connection that is being closed
PAUSE_MODES = {  # inFlight -> vLLM's mode, whether cached keys and values are recomputed
    "keep": ("keep", True),
    "keepStaleCache": ("keep", False),
    "abort": ("abort", True),
    "wait": ("wait", True),
}
CPU_ENVIRONMENT: Mapping[str, str | None] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": None,  # would override the manifest's
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class VllmAdapter:
    """vLLM servers of one pool.

    Args:
        rollout: the pool.
        model: directory of the model they start with.
    """

    def __init__(self, rollout: Rollout, model: Path) -> None:
        self._rollout = rollout
        self._model = model
        self._on_cpu = not _has_gpu()

    def problems(self) -> Iterator[str]:
        """Yield what would keep a server from starting; see :class:`Adapter`. Takes seconds when there are args."""
        if importlib.util.find_spec("vllm") is None:
            yield "engine: vLLM is not installed in this environment; install it beside rljob-rollout"
        elif self._rollout.args:
            command = [sys.executable, "-m", f"{ENGINE_MODULE}.arguments", *self._rollout.args]
            environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == CONFIGURATION_ERROR:
                yield f"args: vLLM refuses them ({first_error(done.stderr.splitlines())}); correct them"

    def launch(self, port: int, key: str) -> Launch:
        """Return how to start a server on ``port`` of loopback; see :class:`Adapter`."""
        pool = self._rollout
        cache_bytes = pool.kv_cache_bytes or (CPU_CACHE_BYTES if self._on_cpu else None)
        options: dict[str, str | int] = {
            "--model": str(self._model),
            "--served-model-name": SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": pool.dtype,
            "--max-model-len": pool.max_model_length,
            "--max-num-seqs": pool.max_concurrency + PROBE_SLOTS,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",  # a model's own defaults must not change the sampling
            "--weight-transfer-config": json.dumps({"backend": "rljob"}),
            "--worker-extension-cls": f"{ENGINE_MODULE}.receiver.WorkerExtension",
            "--middleware": f"{RequireVllmKey.__module__}.{RequireVllmKey.__name__}",
            "--uvicorn-log-level": "warning",
        }
        if cache_bytes is not None:
            options["--kv-cache-memory-bytes"] = cache_bytes
        flags = ["--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log", "--disable-log-stats"]
        if self._on_cpu:
            # A seeded request whose prompt is cut into chunks kills the engine: vLLM turns its random generator back
            # by an offset that generators on CPU do not have.
            flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
            options["--max-num-batched-tokens"] = max(CPU_STEP_TOKENS, pool.max_model_length)
        pairs = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-m", f"{ENGINE_MODULE}.main", str(os.getpid()), *pairs, *flags, *pool.args]
        environment: dict[str, str | None] = {
            KEY_VARIABLE: key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPS_ALIVE_SECONDS),
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": None,  # compiling torch and vLLM at every start costs 15 s
            **(CPU_ENVIRONMENT if self._on_cpu else {}),
        }
        return Launch(command, environment)

    def connect(self, port: int, key: str) -> VllmClient:
        """Return a client of the server on ``port``."""
        return VllmClient(f"http://127.0.0.1:{port}", key)


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


class _RpcReply(msgspec.Struct):
    results: list[Any]


_encode = msgspec.json.Encoder().encode
_reply = msgspec.json.Decoder(_Reply)
_score_reply = msgspec.json.Decoder(_ScoreReply)
_rpc_reply = msgspec.json.Decoder(_RpcReply)
_Decoded = TypeVar("_Decoded")


class VllmClient:
    """A running vLLM server; see :class:`EngineClient`. Needs a running event loop."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEPS_ALIVE_SECONDS),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            raise_for_status=False,
        )
        self._generate_url = f"{url}/inference/v1/generate"
        self._version = "default"  # vLLM's label of the weights it starts with

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def healthy(self) -> bool:
        """Return whether the server is up and its engine alive."""
        try:
            async with self._session.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def responsive(self) -> bool:
        """Return once the engine itself has answered; False when it is dead."""
        try:
            async with self._session.get(f"{self._url}/is_paused") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> Output:
        """Generate a completion; see :class:`EngineClient`."""
        body = {
            "request_id": request,
            "token_ids": _integers(token_ids),
            "cache_salt": self._version,  # what older weights computed is not for new requests
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": sampling.stop_token_ids,
                "ignore_eos": True,  # stop_token_ids are all there are
                "seed": sampling.seed,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        reply = await self._post(self._generate_url, body, _reply)
        choice = reply.choices[0]
        return Output(
            array("i", choice.token_ids).tobytes(),
            array("f", [entry.logprob for entry in choice.logprobs.content]).tobytes(),
            [VersionSpan(_version_number(span.version), span.start, span.end) for span in choice.weight_versions or ()],
            choice.finish_reason,
        )

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop these; their ``generate`` returns what there is."""
        body = {"request_ids": [f"generate-tokens-{request}" for request in requests]}
        await self._post(f"{self._url}/inference/v1/abort_requests", body)

    async def join(self, update: PrepareWeights, seconds: float) -> None:
        """Join the update's weight group; the receiver leaves the one before by itself."""
        info = {
            "transport": update.transport,
            "group": update.group,
            "address": update.address,
            "port": update.port,
            "world_size": update.world_size,
            "bucket_bytes": update.bucket_bytes,
            "timeout_seconds": seconds,
        }
        await self._post(f"{self._url}/init_weight_transfer_engine", {"init_info": info})

    async def pause(self, in_flight: str) -> None:
        """Stop generating."""
        mode, clear = PAUSE_MODES[in_flight]
        await self._post(f"{self._url}/pause?mode={mode}&clear_cache={str(clear).lower()}", None)

    async def receive(self, update: PrepareWeights, seconds: float) -> None:
        """Receive, load and commit the update's weights."""
        info = {
            "names": [meta.name for meta in update.parameters],
            "dtypes": [meta.dtype for meta in update.parameters],
            "shapes": [meta.shape for meta in update.parameters],
            "timeout_seconds": seconds,
        }
        version = f"{update.lineage}.{update.version}"
        await self._post(f"{self._url}/start_weight_update", None)
        await self._post(f"{self._url}/update_weights", {"update_info": info})
        await self._post(f"{self._url}/finish_weight_update", {"weight_version": version})
        self._version = version

    async def resume(self) -> None:
        """Go on generating."""
        await self._post(f"{self._url}/resume", None)

    async def digest(self) -> str:
        """Return the digest of the weights received last."""
        reply = await self._post(f"{self._url}/collective_rpc", {"method": "rljob_weights_digest"}, _rpc_reply)
        digests = {str(result) for result in reply.results}
        if len(digests) != 1:
            raise EngineError("the engine's workers received different weights")
        return digests.pop()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        reply = await self._post(self._generate_url, body, _score_reply)
        positions = zip(token_ids, reply.prompt_logprobs, strict=True)
        return [entry[str(token)].logprob for token, entry in positions if entry is not None]

    async def _post(self, url: str, body: Any, decoder: msgspec.json.Decoder[_Decoded] | None = None) -> _Decoded:
        try:
            async with self._session.post(url, data=None if body is None else _encode(body)) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"vLLM does not answer: {error}") from None
        if response.status != 200:
            reason = f"vLLM answered {response.status}: {content[:500].decode(errors='replace')}"
            raise BadRequestError(reason) if 400 <= response.status < 500 else EngineGoneError(reason)
        if decoder is None:
            return None  # type: ignore[return-value]
        try:
            return decoder.decode(content)
        except msgspec.DecodeError as error:
            raise EngineGoneError(f"vLLM answered what cannot be read: {error}") from None


def _integers(packed: bytes) -> list[int]:
    numbers = array("i")
    numbers.frombytes(packed)
    return numbers.tolist()


def _version_number(label: str) -> int:
    """Return the policy version of a label LINEAGE.VERSION; -1 for weights no update brought."""
    number = label.rpartition(".")[2]
    return int(number) if number.isdigit() else -1


def _has_gpu() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return Path("/dev/nvidiactl").exists()
    return False
