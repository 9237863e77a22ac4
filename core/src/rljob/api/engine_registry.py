"""Built-in inference engines: the entries that validation, rendering and the command line read.

The operator and the CLI read these entries without importing an adapter. To add an engine, write its folder in
``rollout-image/src/rljob/rollout/adapters`` and add an entry to ENGINES. A user's own engine (``module:class``) has no
entry: its adapter checks the arguments in the agent's preflight, and its pods run the image of the pool's template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SHORTEST_ABBREVIATION = len("--m")
ONE_POD = "an engine runs in one pod"
BY_RAY = "rljob connects the hosts of an engine by Ray"
ONE_REPLICA = "the workers of this engine share each layer; set parallelism.tensor or replicas"


@dataclass(frozen=True)
class Engine:
    """One built-in engine.

    Args:
        adapter: module:attribute of the engine's adapter, a :class:`rljob.rollout.adapters.base.Adapter`.
        image: component whose image the engine's pods run, a key of :attr:`rljob.manifests.inputs.Cluster.images`;
            empty: the image of the pool's template.
        governed: argument of the engine's server → reason why `args` must not contain it, or the field to set instead.
            A trailing star matches any suffix.
        cpu_cache_bytes: size of the KV cache on a machine without a GPU if `kvCacheBytes` is not set.
        serves_models: whether the adapter is a :class:`rljob.rollout.adapters.base.ServingAdapter`, for frozen pools.
        spans_hosts: whether an engine may have several pods, which Ray connects.
    """

    adapter: str
    image: str = "rollout"
    governed: Mapping[str, str] = field(default_factory=dict)
    cpu_cache_bytes: int = 0
    serves_models: bool = False
    spans_hosts: bool = False


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        "rljob.rollout.adapters.vllm.adapter:VllmAdapter",
        governed={
            "--api-key": "every server has a key of its own",
            "--api-server-count": "every engine has one server",
            "--config": "write the arguments themselves",
            "--data-parallel-size": "set parallelism.data",
            "--data-parallel-*": "the replicas of an engine are in one pod",
            "--distributed-executor-backend": "set hosts",
            "--dtype": "set dtype",
            "--enable-chunked-prefill": "rljob decides by the device",
            "--enable-scale-out": "always on",
            "--enforce-eager": "rljob decides by the device",
            "--generation-config": "sampling is set by the tasks",
            "--host": "the server listens on loopback",
            "--kv-cache-memory-bytes": "set kvCacheBytes",
            "--logprobs-mode": "the trainer needs processed_logprobs",
            "--max-model-len": "set maxModelLength",
            "--max-num-seqs": "set maxConcurrency",
            "--model": "set model",
            "--disable-log-stats": "always on",
            "--disable-uvicorn-access-log": "always on",
            "--headless": BY_RAY,
            "--max-num-batched-tokens": "rljob decides by the device",
            "--middleware": "rljob's own middleware authenticates requests",
            "--nnodes": BY_RAY,
            "--no-disable-*": "rljob sets it",
            "--no-enable-chunked-prefill": "rljob decides by the device",
            "--no-enable-scale-out": "always on",
            "--no-enforce-eager": "rljob decides by the device",
            "--no-skip-tokenizer-init": "always on: token ids go in and out",
            "--uvicorn-log-level": "rljob sets it",
            "--override-generation-config": "sampling is set by the tasks",
            "--pipeline-parallel-size": "set parallelism.pipeline",
            "--port": "rljob takes a free port",
            "--prefill-context-parallel-size": "an engine has tensor x pipeline x data workers",
            "--root-path": "the agent calls the server at its root",
            "--served-model-name": "only the agent calls the server",
            "--skip-tokenizer-init": "always on: token ids go in and out",
            "--ssl-*": "the server listens on loopback",
            "--tensor-parallel-size": "set parallelism.tensor",
            "--tokens-only": "--enable-scale-out is on instead",
            "--uds": "the server listens on loopback",
            "--weight-transfer-config": "rljob sends the weights",
            "--worker-extension-cls": "rljob's own extension receives the weights",
            "-dp": "set parallelism.data",
            "-pcp": "an engine has tensor x pipeline x data workers",
            "-pp": "set parallelism.pipeline",
            "-tp": "set parallelism.tensor",
        },
        cpu_cache_bytes=256 << 20,
        serves_models=True,
        spans_hosts=True,
    ),
    "sglang": Engine(
        "rljob.rollout.adapters.sglang.sglang_adapter:SglangAdapter",
        image="",  # rollout-image/sglang/Dockerfile: rljob publishes no image of it
        governed={
            "--admin-api-key": "every server has a key of its own",
            "--api-key": "every server has a key of its own",
            "--attention-context-parallel-size": ONE_REPLICA,
            "--attention-data-parallel-size": ONE_REPLICA,
            "--attn-cp-*": ONE_REPLICA,
            "--attn-dp-*": ONE_REPLICA,
            "--config": "write the arguments themselves",
            "--context-length": "set maxModelLength",
            "--data-parallel-size": ONE_REPLICA,
            "--dcp*": ONE_REPLICA,
            "--decode-context-parallel-size": ONE_REPLICA,
            "--device": "set accelerator",
            "--disable-overlap-schedule": "rljob decides by the device",
            "--disaggregation-*": ONE_POD,
            "--dist-*": ONE_POD,
            "--dp*": ONE_REPLICA,
            "--dtype": "set dtype",
            "--enable-dp-*": ONE_REPLICA,
            "--grpc-*": "the agent uses HTTP",
            "--host": "the server listens on loopback",
            "--is-embedding": "the agent generates",
            "--json-model-override-args": "the trainer computes with the config.json of the model",
            "--load-format": "the server starts with the weights of the model",
            "--max-running-requests": "set maxConcurrency",
            "--max-total-tokens": "set kvCacheBytes",
            "--model": "set model",
            "--model-path": "set model",
            "--nccl-port": "rljob takes a free port",
            "--nnodes": ONE_POD,
            "--node-rank": ONE_POD,
            "--pipeline-parallel-size": ONE_REPLICA,
            "--port": "rljob takes a free port",
            "--pp*": ONE_REPLICA,
            "--preferred-sampling-params": "sampling is set by the tasks",
            "--sampling-defaults": "sampling is set by the tasks",
            "--served-model-name": "only the agent calls the server",
            "--skip-server-warmup": "always on",
            "--skip-tokenizer-init": "always on: token ids go in and out",
            "--smg-*": "the agent uses HTTP",
            "--ssl-*": "the server listens on loopback",
            "--tensor-parallel-size": "set parallelism.tensor",
            "--tokenizer-worker-num": "every engine has one server",
            "--tp*": "set parallelism.tensor",
            "--use-ray": ONE_POD,
            "--weight-version": "rljob sends the weights",
        },
        cpu_cache_bytes=256 << 20,
    ),
}
"""Name in the manifest → engine."""


def engine_docs() -> str:
    """Return the description of ``spec.rollouts[].engine``."""
    names = ", ".join(f"`{name}`" for name in ENGINES)
    without_image = ", ".join(f"`{name}`" for name, engine in ENGINES.items() if not engine.image)
    return (
        f"The inference engine: {names}, or `module:class` of your own package, an engine adapter. In a cluster the "
        f"pods of {without_image} and of your own adapter run the image of `template`."
    )


def image_of(engine: str) -> str:
    """Return the component whose image the pods of an engine run; empty: they run the image of the pool's template."""
    return ENGINES[engine].image if engine in ENGINES else ""


def cpu_cache_bytes(engine: str) -> int:
    """Return the size of an engine's KV cache on a machine without a GPU if `kvCacheBytes` is not set; 0 if unknown."""
    return ENGINES[engine].cpu_cache_bytes if engine in ENGINES else 0


def serves_models(engine: str) -> bool:
    """Return whether an engine can serve a model to rewards. Of a user's own adapter the agent's preflight decides."""
    return engine not in ENGINES or ENGINES[engine].serves_models


def spanning_engines() -> list[str]:
    """Return the names of the engines that may have several hosts."""
    return [name for name, engine in ENGINES.items() if engine.spans_hosts]


def refused(engine: str, args: Sequence[str]) -> Iterator[str]:
    """Yield ``args[i]: sentence`` for every argument that rljob sets, in full or abbreviated form."""
    governed_args = ENGINES[engine].governed if engine in ENGINES else {}
    for index, arg in enumerate(args):
        name = arg.partition("=")[0].partition(".")[0].replace("_", "-")
        for governed, reason in governed_args.items():
            if _matches(name, governed):
                yield f"args[{index}]: {arg!r} is governed by rljob ({reason}); remove it"
                break


def _matches(name: str, governed: str) -> bool:
    if governed.endswith("*") and name.startswith(governed.removesuffix("*")):
        return True
    abbreviated = name.startswith("--") and len(name) >= SHORTEST_ABBREVIATION and governed.startswith(name)
    return name == governed or abbreviated
