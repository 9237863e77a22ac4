"""Adapter of SGLang: arguments and environment of its server, checks of the pool, errors in its log.

The server runs in the agent's own Python, or in that of ``RLJOB_SGLANG_PYTHON``: SGLang and vLLM pin different versions
of the same packages, so engines of both on one machine need two environments, each with rljob-rollout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rljob.api.engine_registry import cpu_cache_bytes
from rljob.api.memory_plan import DTYPE_BYTES
from rljob.api.model_shape import shape_of
from rljob.api.roles import Rollout
from rljob.protocol.environment import SGLANG_PYTHON
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.rollout.adapters.base import Launch
from rljob.rollout.adapters.model_split import DIVIDED, tensor_problems
from rljob.rollout.adapters.sglang.main import KEY_VARIABLE
from rljob.rollout.adapters.sglang.sglang_client import PAUSE_MODES, SglangClient
from rljob.rollout.answer_end import load_tokenizer
from rljob.rollout.exit_diagnosis import describe_end, first_error
from rljob.rollout.model_config import text_config

PACKAGE = "rljob.rollout.adapters.sglang"
MODULES = ("sglang", "sgl_kernel", "rljob")
_MISSING = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
LOG_PREFIX = r"(?:\[\d[^\]]*\]\s*|sglang (?=serve: error: ))?"
"""Prefix of a log line, for example: [2026-11-23 12:00:00 TP0]; or the first word of SGLang's name in its usage."""
_KILLED = re.compile(LOG_PREFIX + r"Subprocess (\S+) \(pid=\d+\) crashed with exit code (-\d+)")
PROBE_SLOTS = 8  # sequences beyond the pool's concurrency, so that a probe never waits for a slot
CPU_MEMORY_SHARE = "0.5"
"""Upper bound of the share of memory for weights and KV cache on a CPU; kvCacheBytes is the real bound."""
CPU_OPTIONS = {"--device": "cpu", "--attention-backend": "torch_native", "--mem-fraction-static": CPU_MEMORY_SHARE}
CPU_ENVIRONMENT: Mapping[str, str | None] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first requests wait for a C++ compiler, of several workers minutes
}
WORKERS_ENVIRONMENT = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}  # not used here, and it listens without a key
CPU_WORKERS_ENVIRONMENT = {"SGLANG_NCCL_SO_PATH": os.devnull}  # with NCCL, which torch may bring, it wants GPUs


class SglangAdapter:
    """SGLang servers of one pool; see :class:`~rljob.rollout.adapters.base.Adapter`.

    Args:
        pool: the manifest's entry.
        model: directory of the model they start with.
    """

    def __init__(self, pool: Rollout, model: Path) -> None:
        self._pool = pool
        self._model = model
        self._on_cpu = pool.accelerator.kind != "nvidia"
        self._python = os.environ.get(SGLANG_PYTHON, sys.executable)

    @property
    def in_flight(self) -> frozenset[str]:
        """The modes. With SGLang's overlapped scheduler, which runs on GPUs, a request that keeps its cache has one
        token of the old weights under the new version."""
        return frozenset(PAUSE_MODES) - (frozenset() if self._on_cpu else {"keepStaleCache"})

    def problems(self) -> Iterator[str]:
        """Yield each reason why a server cannot start. Takes 10 s if the pool has args."""
        sizes = self._pool.parallelism
        for size, count in (("pipeline", sizes.pipeline), ("data", sizes.data)):
            if count > 1:
                yield (
                    f"parallelism.{size}: the workers of an engine of sglang share each layer; remove it, and raise "
                    "parallelism.tensor or replicas"
                )
        yield from tensor_problems("SGLang", self._model, sizes.tensor, (*DIVIDED, "moe_intermediate_size"))
        yield from self._cache_problems()
        try:
            missing = self._run(["-c", _MISSING, *MODULES]).stdout.split()
        except OSError as error:
            yield f"engine: {SGLANG_PYTHON} is {self._python!r}, which cannot be started ({error}); correct it"
            return
        if missing:
            yield (
                f"engine: the environment of {self._python} lacks {' and '.join(missing)}; install SGLang and "
                f"rljob-rollout there, or set {SGLANG_PYTHON} to the Python of an environment that has them"
            )
        elif self._pool.args:
            done = self._run(["-m", f"{PACKAGE}.sglang_arguments", *self._pool.args])
            if done.returncode == CONFIGURATION_ERROR:
                yield f"args: SGLang refuses them ({self.find_error(done.stderr.splitlines())}); correct them"

    def _cache_problems(self) -> Iterator[str]:
        """SGLang has no option for the bytes of its cache, but one for its tokens."""
        pool, tokens = self._pool, self._cache_tokens()
        if tokens is None:
            if pool.kv_cache_bytes is not None and self._model.is_dir():  # else it is not made yet
                yield (
                    "kvCacheBytes: SGLang counts its cache in tokens, and the size of a token is not known for the "
                    f"model {self._model}; remove it"
                )
        elif tokens < pool.max_model_length:
            yield (
                f"kvCacheBytes: holds {tokens} tokens of {self._model}, and maxModelLength is {pool.max_model_length}; "
                "raise it, or lower maxModelLength"
            )

    def _cache_tokens(self) -> int | None:
        """Return how many tokens the KV cache has; None if SGLang decides. Each worker has its heads of all tokens, at
        least one head."""
        pool = self._pool
        size = pool.kv_cache_bytes or (cpu_cache_bytes("sglang") if self._on_cpu else None)
        shape = shape_of(self._model)
        if size is None or shape is None:
            return None
        assert pool.dtype is not None, "resolve() sets it"
        heads = max(1, shape.key_value_heads // pool.parallelism.tensor)
        return size // (2 * shape.layers * heads * shape.head_size * DTYPE_BYTES[pool.dtype])  # key and value

    def _run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = [self._python, *arguments]
        added = {name: value for name, value in self._environment().items() if value is not None}
        return subprocess.run(command, env=os.environ | added, capture_output=True, text=True, check=False)

    def _environment(self) -> Mapping[str, str | None]:
        return {
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # its processes are on this machine
            "PYTHONDONTWRITEBYTECODE": None,  # without bytecode files every start compiles torch and SGLang
            **(CPU_ENVIRONMENT if self._on_cpu else {}),
            **self._environment_of_workers(),
        }

    def _environment_of_workers(self) -> Mapping[str, str | None]:
        """Return the variables of a server with several workers."""
        workers = self._pool.parallelism.workers
        if workers == 1:
            return {}
        return WORKERS_ENVIRONMENT | (CPU_WORKERS_ENVIRONMENT | _cores(workers) if self._on_cpu else {})

    def launch(self, port: int, key: str) -> Launch:
        """Return how to start a server on ``port`` of loopback."""
        pool = self._pool
        assert pool.dtype is not None, "resolve() sets it"
        options: dict[str, str | int] = {
            "--model-path": str(self._model),
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": pool.dtype,
            "--tensor-parallel-size": pool.parallelism.tensor,
            "--context-length": pool.max_model_length,
            "--max-running-requests": pool.max_concurrency + PROBE_SLOTS,
            "--sampling-defaults": "openai",  # a model's own defaults must not change the sampling
            "--log-level": "warning",
            **(CPU_OPTIONS if self._on_cpu else {}),
        }
        tokens = self._cache_tokens()
        if tokens is not None:
            options["--max-total-tokens"] = tokens
        flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
        flags += ["--disable-overlap-schedule"] if self._on_cpu else []
        pairs = [str(part) for option in options.items() for part in option]
        command = [self._python, "-m", f"{PACKAGE}.main", *pairs, *flags, *pool.args]
        return Launch(command, {KEY_VARIABLE: key, **self._environment()})

    def connect(self, port: int, key: str) -> SglangClient:
        """Return a client of the server on ``port``."""
        vocabulary = text_config(self._model).get("vocab_size")
        known = vocabulary if isinstance(vocabulary, int) else None
        return SglangClient(f"http://127.0.0.1:{port}", key, known, lambda: load_tokenizer(str(self._model)))

    def find_error(self, lines: Iterable[str]) -> str:
        """Return which signal killed a process of the server, else the first error that SGLang's log names."""
        log = list(lines)
        killed = next((found for found in map(_KILLED.match, log) if found), None)
        return describe_end(int(killed[2]), False, f"SGLang's {killed[1]}") if killed else first_error(log, LOG_PREFIX)


def _cores(workers: int) -> dict[str, str]:
    """Return the variable that gives each worker a part of this process's cores, all of them if there are fewer. SGLang
    demands it; the test module in the place of its kernels binds no thread."""
    cores = sorted(os.sched_getaffinity(0))
    parts = (cores[worker::workers] or cores for worker in range(workers))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}
