"""Engines that span several hosts: what their fields must satisfy, and the GPUs that they need."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.engine_registry import spanning_engines
from rljob.api.roles import Rollout

ENGINE = f"only engines of {' and '.join(spanning_engines())} span hosts; set hosts: 1, or another engine"
ON_CPU = "vLLM on a CPU does not support Ray, by which an engine spans hosts; set hosts: 1"
REPLICAS_OF_MODEL = "an engine that spans hosts has one replica of the model; set data: 1, and raise replicas"
UNEVEN_HOSTS = "does not divide the workers of an engine (tensor × pipeline); every host needs the same number"


def host_problems(pool: Rollout) -> Iterator[str]:
    """Yield ``field: sentence`` for each field of a pool with which its engines cannot span hosts."""
    if pool.hosts == 1:
        return
    if pool.engine not in spanning_engines():
        yield f"hosts: {pool.engine} runs in one pod; {ENGINE}"
    if pool.accelerator.kind == "cpu":
        yield f"hosts: {ON_CPU}"
    if pool.parallelism.data > 1:
        yield f"parallelism.data: {REPLICAS_OF_MODEL}"
    if pool.parallelism.workers % pool.hosts:
        yield f"hosts: {pool.hosts} {UNEVEN_HOSTS}"


def describe_hosts(pools: list[Rollout]) -> Iterator[str]:
    """Yield a sentence for each pool whose engines span hosts: what an engine and the pool need."""
    for pool in pools:
        if pool.hosts == 1:
            continue
        each, least, most = pool.parallelism.workers, pool.replicas.min, pool.replicas.max or pool.replicas.min
        engines = f"{least}" if most == least else f"{least} to {most}"
        gpus = f"{least * each}" if most == least else f"{least * each} to {most * each}"
        yield (
            f"pool {pool.name}: an engine has {each} GPUs on {pool.hosts} hosts, {pool.devices} on each; "
            f"{engines} engine{'' if engines == '1' else 's'}, {gpus} GPUs"
        )
