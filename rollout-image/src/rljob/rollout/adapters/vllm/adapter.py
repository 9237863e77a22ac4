"""Adapter of vLLM: arguments and environment of its server, checks of the manifest's `args`, errors in its log."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from rljob.api.engine_registry import cpu_cache_bytes
from rljob.api.roles import Rollout
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.rollout.adapters.base import Launch
from rljob.rollout.adapters.http_client import KEEP_ALIVE_SECONDS
from rljob.rollout.adapters.model_split import DIVIDED, pipeline_problems, tensor_problems
from rljob.rollout.adapters.vllm.engine_exit import find_kill
from rljob.rollout.adapters.vllm.server_key import KEY_VARIABLE, RequireVllmKey
from rljob.rollout.adapters.vllm.vllm_client import PAUSE_MODES, VllmClient
from rljob.rollout.exit_diagnosis import first_error
from rljob.rollout.model_config import head_size

PACKAGE = "rljob.rollout.adapters.vllm"
LOG_PREFIX = r"(?:\([^)]*\)\s*)*(?:ERROR\s.*?\]\s*)?"
"""Prefix of a log line, for example: (EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1]."""
COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""Ray colors the prefix of lines of workers on other hosts."""
SERVED_NAME = "model"
PROBE_SLOTS = 8  # sequences beyond the pool's concurrency, so that a probe never waits for a slot
CPU_STEP_TOKENS = 8192
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads of vLLM's CPU backend (CPUAttentionBackend)."""
HEAD_BYTES = 64 << 10  # request line and headers of one request
SERVER_KEEP_ALIVE_SECONDS = 6 * KEEP_ALIVE_SECONDS
LOOPBACK = "lo"
CPU_ENVIRONMENT: Mapping[str, str | None] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": None,  # would override the value of the manifest
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class VllmAdapter:
    """vLLM servers of one pool; see :class:`~rljob.rollout.adapters.base.Adapter`.

    Args:
        pool: the manifest's entry.
        model: directory of the model they start with.
    """

    in_flight = frozenset(PAUSE_MODES)

    def __init__(self, pool: Rollout, model: Path) -> None:
        self._pool = pool
        self._model = model
        self._on_cpu = pool.accelerator.kind != "nvidia"

    def problems(self) -> Iterator[str]:
        """Yield each reason why a server cannot start. Takes 10 s if the pool has args."""
        if importlib.util.find_spec("vllm") is None:
            yield "engine: vLLM is not installed in this environment; install it beside rljob-rollout"
            return
        if self._on_cpu != _is_cpu_build():
            built, other = ("GPUs", "vllm-cpu") if self._on_cpu else ("CPUs", "vllm")
            wanted = "nvidia" if self._on_cpu else "cpu"
            yield f"accelerator.kind: this environment has vLLM for {built}; install {other} instead, or set {wanted}"
        size = head_size(self._model)
        if self._on_cpu and size is not None and size not in CPU_HEAD_SIZES:
            yield (
                f"model: vLLM on a CPU cannot run {self._model} with attention heads of size {size} (config.json); use "
                f"a model with one of {', '.join(map(str, CPU_HEAD_SIZES))}"
            )
        sizes = self._pool.parallelism
        yield from tensor_problems("vLLM", self._model, sizes.tensor, (*DIVIDED, "vocab_size"))
        yield from pipeline_problems(self._model, sizes.pipeline)
        if self._pool.args:
            command = [sys.executable, "-m", f"{PACKAGE}.check_arguments", *self._pool.args]
            environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == CONFIGURATION_ERROR:
                yield f"args: vLLM refuses them ({self.find_error(done.stderr.splitlines())}); correct them"

    def launch(self, port: int, key: str) -> Launch:
        """Return how to start a server on ``port`` of loopback."""
        options: dict[str, str | int] = {
            "--served-model-name": SERVED_NAME,
            "--logprobs-mode": "processed_logprobs",
            "--weight-transfer-config": json.dumps({"backend": "rljob"}),
            "--worker-extension-cls": f"{PACKAGE}.weight_transfer.WorkerExtension",
        }
        flags = ["--enable-scale-out", "--skip-tokenizer-init"]
        return self._launch(port, key, options, flags, {"VLLM_SERVER_DEV_MODE": "1"})

    def launch_frozen(self, port: int, key: str) -> Launch:
        """Return how to start a server of a model that gets no weights; see
        :class:`~rljob.rollout.adapters.base.ServingAdapter`."""
        return self._launch(port, key, {"--served-model-name": self._pool.name}, [], {"VLLM_SERVER_DEV_MODE": None})

    def _launch(
        self, port: int, key: str, own: Mapping[str, str | int], flags: list[str], variables: Mapping[str, str | None]
    ) -> Launch:
        """Return a launch with the options that both kinds of servers have, and ``own`` ones."""
        pool = self._pool
        assert pool.dtype is not None, "resolve() sets it"
        cache_bytes = pool.kv_cache_bytes or (cpu_cache_bytes("vllm") if self._on_cpu else None)
        options: dict[str, str | int] = {
            "--model": str(self._model),
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": pool.dtype,
            "--max-model-len": pool.max_model_length,
            "--tensor-parallel-size": pool.parallelism.tensor,
            "--pipeline-parallel-size": pool.parallelism.pipeline,
            "--data-parallel-size": pool.parallelism.data,
            "--max-num-seqs": pool.max_concurrency + PROBE_SLOTS,
            "--generation-config": "vllm",  # a model's own defaults must not change the sampling
            "--middleware": f"{RequireVllmKey.__module__}.{RequireVllmKey.__name__}",
            "--uvicorn-log-level": "warning",
            "--h11-max-incomplete-event-size": HEAD_BYTES,
            **own,
        }
        if cache_bytes is not None:
            options["--kv-cache-memory-bytes"] = cache_bytes
        if pool.hosts > 1:
            options["--distributed-executor-backend"] = "ray"
        flags = [*flags, "--disable-uvicorn-access-log", "--disable-log-stats"]
        if self._on_cpu:
            # A seeded request whose prompt is split into chunks kills the engine: vLLM resets the request's random
            # generator by an offset, which CPU generators do not have.
            flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
            options["--max-num-batched-tokens"] = max(CPU_STEP_TOKENS, pool.max_model_length)
        pairs = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", f"{PACKAGE}.main", *pairs, *flags, *pool.args]
        environment: dict[str, str | None] = {
            KEY_VARIABLE: key,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_SECONDS),
            "HF_HUB_OFFLINE": "1",
            **_addresses(pool.hosts),
            "PYTHONDONTWRITEBYTECODE": None,  # without bytecode files every start compiles torch and vLLM: 15 s
            **(CPU_ENVIRONMENT if self._on_cpu else {}),
            **variables,
        }
        return Launch(command, environment)

    def connect(self, port: int, key: str) -> VllmClient:
        """Return a client of the server on ``port``."""
        return VllmClient(f"http://127.0.0.1:{port}", key)

    def find_error(self, lines: Iterable[str]) -> str:
        """Return which signal killed the engine process, else the first error that vLLM's log names."""
        log = [COLOR.sub("", line) for line in lines]
        return find_kill(log) or first_error(log, LOG_PREFIX)


def _addresses(hosts: int) -> Mapping[str, str | None]:
    """Return the variables that decide on which addresses vLLM's processes listen: loopback, if they are processes of
    this machine. Otherwise those of other hosts must reach them; the operator's network policies keep others away."""
    if hosts == 1:
        return {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    return {"VLLM_HOST_IP": os.environ["RLJOB_HOST"]}


def _is_cpu_build() -> bool:
    """Return whether the installed vLLM runs on CPUs only."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "+cpu" in metadata.version("vllm")
    return True
