"""The RLJobs of the operator benchmark: children, changes, and the status that coordinators write."""

from __future__ import annotations

import secrets
from typing import Any

from rljob.api.models import RLJob
from rljob.manifests.inputs import Cluster, Object, RenderTarget
from rljob.manifests.render import ALL_TOKENS, TOKEN_ROLES, render, secret

JOBS_PER_NAMESPACE = 10
STORAGE_CLASS = "kwok-volume"
CLUSTER = Cluster(storage_class=STORAGE_CLASS)


def namespace(index: int, prefix: str = "bench") -> str:
    """Return the namespace of a job."""
    return f"{prefix}-{index // JOBS_PER_NAMESPACE:02}"


def name(index: int) -> str:
    """Return the name of a job."""
    return f"job-{index:03}"


def spec(pods: int) -> dict[str, Any]:
    """Return the spec of a job with ``pods`` pods: coordinator, runner, two of a reward, trainer, engines."""
    assert pods >= 6, "a job has six pods at least: four of CPU roles, one trainer, one engine"
    trainers = max(1, (pods - 4) // 3)
    engines = pods - 4 - trainers
    return {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1_000_000},
        "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"}],
        "rewards": [{"name": "sums", "builtin": "reasoning_gym", "replicas": {"min": 2}}],
        "trainer": {"nodes": trainers},
        "rollouts": [{"name": "main", "replicas": {"min": engines, "max": engines + 4}}],
    }


def manifest(index: int, pods: int, prefix: str = "bench") -> Object:
    """Return the manifest of an RLJob."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name(index), "namespace": namespace(index, prefix)},
        "spec": spec(pods),
    }


def children(index: int, pods: int, uid: str, prefix: str) -> list[Object]:
    """Return all children of a job as the operator renders them, and the Secret of its tokens."""
    job = RLJob.model_validate({**manifest(index, pods), "metadata": {"name": name(index)}})
    context = RenderTarget(cluster=CLUSTER, namespace=namespace(index, prefix), uid=uid)
    tokens = {role: secrets.token_hex(16) for role in (*TOKEN_ROLES, ALL_TOKENS)}
    found = [child for role in render(job, context) for child in role.objects]
    return [*found, secret(job, context, tokens)]


def changed_spec(index: int, pods: int, how: str) -> dict[str, Any]:
    """Return a merge patch of a job.

    Args:
        index: of the job.
        pods: of the job.
        how: ``more``: one more engine; any other text: an annotation of the runner's pod template.
    """
    if how == "more":
        rollouts = spec(pods)["rollouts"]
        rollouts[0]["replicas"]["min"] += 1
        return {"spec": {"rollouts": rollouts}}
    return {"spec": {"runner": {"template": {"metadata": {"annotations": {"bench": how}}}}}}


def run_status(index: int, pods: int, tick: int) -> dict[str, Any]:
    """Return the status.run that a coordinator applies in its ``tick``-th update; metrics differ between updates."""
    engines = spec(pods)["rollouts"][0]["replicas"]["min"]
    return {
        "state": "Running",
        "incarnation": 1,
        "observedGeneration": 1,
        "progress": {
            "step": tick,
            "steps": 1_000_000,
            "text": f"{tick}/1000000 0%",
            "seconds": tick * 10.0,
            "etaSeconds": 1e6,
        },
        "policy": {"version": tick, "lineage": 0, "digest": f"{tick:064x}"},
        "lastCheckpoint": {"step": tick // 20 * 20, "path": f"checkpoints/step-{tick // 20 * 20}"},
        "staleness": "0.8/1",
        "queues": [{"name": where, "value": tick % 7} for where in ("waiting", "generating", "scoring", "complete")],
        "metrics": [
            {"name": what, "value": tick / 3}
            for what in ("reward/mean", "loss", "grad_norm", "tokens_per_second", "seconds")
        ],
        "engines": [{"name": f"{name(index)}-rollout-main-{i}", "load": (tick + i) % 64} for i in range(engines)],
    }
