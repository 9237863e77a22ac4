"""Which fields of the manifest one machine supports: `rljob run` applies, warns of no effect, or refuses.

Applied in every role's template: `env` with a value, `command` and `args` of the container `main` (commands.py), and
`nccl` of trainer and pools. All other fields of the manifest are applied, or refused at loading
(rljob.api.unsupported).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob.api.diff import non_defaults
from rljob.api.models import RLJob
from rljob.api.pods import MAIN
from rljob.local import commands

STORAGE = "the run directory is the storage"
NO_PODS = "there are no pods to place"
LOOPBACK = "everything listens on loopback"
MEMORY = "processes share the memory of this machine"
THIS_NETWORK = "everything uses the network of this machine"
MINIMUM = "as many as min are started"
STAYS = "the run directory stays and is served by no coordinator after the end"

NO_EFFECT_LOCALLY: dict[str, str] = {
    "storage.size": STORAGE,
    "storage.retention": STORAGE,
    "storage.claim": STORAGE,
    "scheduling.gang.provider": NO_PODS,
    "scheduling.priorityClassName": NO_PODS,
    "scheduling.topology": NO_PODS,
    "rewards[*].replicas.min": "one process is started; set processes for more workers in it",
    "rewards[*].replicas.max": "one process is started; set processes for more workers in it",
    "rollouts[*].replicas.max": MINIMUM,
    "runner.replicas.max": MINIMUM,
    "trainer.sharedMemory": MEMORY,
    "trainer.rdma": NO_PODS,
    "trainer.hostNetwork": THIS_NETWORK,
    "rollouts[*].sharedMemory": MEMORY,
    "rollouts[*].rdma": NO_PODS,
    "rollouts[*].hostNetwork": THIS_NETWORK,
    "network.policy": LOOPBACK,
    "network.allowFrom": LOOPBACK,
    "network.egress.policy": "connections outwards are not limited",
    "network.egress.to": "connections outwards are not limited",
    "network.nodes": LOOPBACK,
    "failurePolicy.disruption": "this machine is not drained",
    "failurePolicy.pendingSeconds": NO_PODS,
    "ttlSecondsAfterFinished": STAYS,
    "keepCoordinatorSeconds": STAYS,
    "managedBy": "there is no operator",
}
"""Path below spec → why it has no effect on this machine."""
IDENTITY = ("namespace", "labels", "annotations")
"""Metadata that only a cluster uses."""

TEMPLATES = (
    "initializer.template",
    "trainer.template",
    "rollouts[*].template",
    "rewards[*].template",
    "runner.template",
    "coordinator.template",
)
HONOURED_IN_MAIN = ("name", "env", "command", "args")


def warnings(job: RLJob) -> list[str]:
    """Return a warning for each field that is set and has no effect on this machine."""
    lines = [
        f"spec.{found.path}: has no effect here, {reason}"
        for pattern, reason in NO_EFFECT_LOCALLY.items()
        for found in non_defaults(job.spec, pattern)
    ]
    lines += [
        f"metadata.{found.path}: has no effect here, there is no cluster"
        for field in IDENTITY
        for found in non_defaults(job.metadata, field)
    ]
    own = {f"rewards[{i}].template" for i, reward in enumerate(job.spec.rewards) if reward.local is not None}
    for pattern in TEMPLATES:
        for found in non_defaults(job.spec, pattern):
            if found.path in own:
                lines.append(f"spec.{found.path}: has no effect here, local.command is run instead")
            elif ignored := list(_without_effect(found.value)):
                lines.append(f"spec.{found.path}: of no effect here, as there are no pods: {', '.join(ignored)}")
    return lines


def errors(job: RLJob) -> list[str]:
    """Return an error for each field that this machine cannot satisfy."""
    lines = []
    if job.spec.suspend:
        lines.append("spec.suspend: the job asks not to be run; set suspend: false to run it")
    if job.spec.trainer.nodes > 1:
        lines.append(
            f"spec.trainer.nodes: {job.spec.trainer.nodes} nodes are asked for, and this is one machine; set nodes: 1, "
            "and processesPerNode for more processes"
        )
    lines += _gpus(job)
    for i, reward in enumerate(job.spec.rewards):
        if not reward.served_by_rljob and reward.url is None and reward.local is None:
            lines.append(
                f"spec.rewards[{i}].template: a container cannot be run on this machine; add local: {{command: […]}} "
                "beside it"
            )
    return lines


def _gpus(job: RLJob) -> Iterator[str]:
    """Yield an error for each role that needs GPUs if there are none."""
    roles = {"trainer": job.spec.trainer.accelerator}
    roles |= {f"rollouts[{i}]": pool.accelerator for i, pool in enumerate(job.spec.rollouts)}
    for path, accelerator in roles.items():
        if accelerator.kind == "nvidia" and not commands.GPU.exists():
            yield f"spec.{path}.accelerator.kind: this machine has no NVIDIA GPU; set auto for what there is, or cpu"


def _without_effect(template: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of a template's fields that have no effect outside a cluster."""
    for key, value in template.items():
        if key != "spec":
            yield key
            continue
        for field, inner in (value or {}).items():
            if field != "containers":
                yield f"spec.{field}"
                continue
            for container in inner or []:
                name = container["name"]
                if name != MAIN:
                    yield f"container {name}"
                    continue
                yield from (f"{field} of {MAIN}" for field in container if field not in HONOURED_IN_MAIN)
                variables = container.get("env") or []
                yield from (f"{variable['name']} of {MAIN}" for variable in variables if "valueFrom" in variable)
