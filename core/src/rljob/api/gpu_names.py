"""GPUs that templates name in CUDA_VISIBLE_DEVICES of their main containers."""

from __future__ import annotations

from rljob.api.models import RLJobSpec
from rljob.api.pod_models import main_variables
from rljob.api.roles import Rollout, Trainer

VISIBLE = "CUDA_VISIBLE_DEVICES"
UUID_PREFIXES = ("GPU-", "MIG-")


def entries(value: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES; a comma at the end is ignored."""
    names = [entry.strip() for entry in value.split(",")]
    return names if names[-1] else names[:-1]


def selection_of(role: Trainer | Rollout) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of the template of a role; None if it does not set it."""
    return main_variables(role.template).get(VISIBLE)


def named_gpus(role: Trainer | Rollout) -> list[str]:
    """Return the GPUs that the template of a role on GPUs names."""
    return entries(selection_of(role) or "") if role.accelerator.kind == "nvidia" else []


def shares_gpu(spec: RLJobSpec) -> bool:
    """Return whether the templates of the trainer and of a pool name the same GPU in the same way; a UUID may be
    abbreviated."""
    of_pools = [name for pool in spec.rollouts for name in named_gpus(pool)]
    return any(_same(mine, theirs) for mine in named_gpus(spec.trainer) for theirs in of_pools)


def _same(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return one == other or (shorter.startswith(UUID_PREFIXES) and longer.startswith(shorter))
