"""Arguments of an engine's server that users must not set, because rljob sets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ONE_WORKER = "an engine has one worker so far"

GOVERNED: dict[str, dict[str, str]] = {
    "vllm": {
        "--api-key": "every server has a key of its own",
        "--api-server-count": "every engine has one server",
        "--config": "write the arguments themselves",
        "--data-parallel-*": ONE_WORKER,
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
        "--headless": ONE_WORKER,
        "--max-num-batched-tokens": "rljob decides by the device",
        "--middleware": "rljob's own guards the server",
        "--nnodes": ONE_WORKER,
        "--no-disable-*": "rljob sets it",
        "--no-enable-chunked-prefill": "rljob decides by the device",
        "--no-enable-scale-out": "always on",
        "--no-enforce-eager": "rljob decides by the device",
        "--no-skip-tokenizer-init": "always on: token ids go in and out",
        "--uvicorn-log-level": "rljob sets it",
        "--override-generation-config": "sampling is set by the tasks",
        "--pipeline-parallel-size": ONE_WORKER,
        "--port": "rljob takes a free port",
        "--root-path": "the agent calls the server at its root",
        "--served-model-name": "only the agent calls the server",
        "--skip-tokenizer-init": "always on: token ids go in and out",
        "--ssl-*": "the server listens on loopback",
        "--tensor-parallel-size": ONE_WORKER,
        "--tokens-only": "--enable-scale-out is on instead",
        "--uds": "the server listens on loopback",
        "--weight-transfer-config": "rljob sends the weights",
        "--worker-extension-cls": "rljob's own receives the weights",
        "-dp": ONE_WORKER,
        "-pp": ONE_WORKER,
        "-tp": ONE_WORKER,
    },
    "sglang": {},
}
"""Engine → argument → why it is refused or what to set instead. A trailing star matches any ending."""

SHORTEST_ABBREVIATION = len("--m")


def refused(engine: str, args: Sequence[str]) -> Iterator[str]:
    """Yield ``args[i]: sentence`` for every argument that rljob sets, written in full or abbreviated."""
    for index, arg in enumerate(args):
        name = arg.partition("=")[0].partition(".")[0].replace("_", "-")
        for governed, instead in GOVERNED.get(engine, {}).items():
            if _means(name, governed):
                yield f"args[{index}]: {arg!r} is governed by rljob ({instead}); remove it"
                break


def _means(name: str, governed: str) -> bool:
    if governed.endswith("*") and name.startswith(governed.removesuffix("*")):
        return True
    abbreviated = name.startswith("--") and len(name) >= SHORTEST_ABBREVIATION and governed.startswith(name)
    return name == governed or abbreviated
