"""Which fields of the manifest `rljob run` supports on one machine: applied, without effect (a warning), or an error.

The metadata of the fields (rljob.api.field_metadata) lists those without effect on one machine. Of every role's
template, `env` with a value, `command` and `args` of the container `main` are applied (commands.py). All other fields
are applied, or rejected at loading (rljob.api.unsupported).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rljob.api.diff import non_defaults
from rljob.api.field_metadata import manifest_fields, outermost
from rljob.api.models import RLJob
from rljob.api.pod_models import MAIN
from rljob.local import gpu_assignment
from rljob.protocol.gpus import Gpu

SUPPORTED_IN_MAIN = ("name", "env", "command", "args")


def warnings(job: RLJob) -> list[str]:
    """Return a warning for each field that is set and has no effect on this machine."""
    fields = manifest_fields(RLJob)
    lines = [
        f"{found.path}: has no effect here, {field.local}"
        for field in outermost(fields, lambda field: field.local)
        for found in non_defaults(job, field.path)
    ]
    own = {f"spec.{path}.template" for path, service in job.spec.services.items() if service.local is not None}
    for field in outermost(fields, lambda field: field.local_part):
        for found in non_defaults(job, field.path):
            if found.path in own:
                lines.append(f"{found.path}: has no effect here, local.command is run instead")
            elif ignored := list(_without_effect(found.value)):
                lines.append(f"{found.path}: fields of pods have no effect here: {', '.join(ignored)}")
    return lines


def errors(job: RLJob, gpus: Sequence[Gpu]) -> list[str]:
    """Return an error for each field of a resolved job that this machine, with its GPUs, cannot satisfy."""
    lines = []
    if job.spec.suspend:
        lines.append("spec.suspend: the job is suspended; set suspend: false to run it")
    if job.spec.trainer.nodes > 1:
        lines.append(
            f"spec.trainer.nodes: {job.spec.trainer.nodes} nodes are requested, and this is one machine; set nodes: 1, "
            "and processesPerNode for more processes"
        )
    lines += [
        f"spec.rollouts[{i}].hosts: an engine on {pool.hosts} hosts is requested, and this is one machine; set "
        "hosts: 1, and parallelism for the GPUs of this machine"
        for i, pool in enumerate(job.spec.rollouts)
        if pool.hosts > 1
    ]
    lines += gpu_assignment.problems(job, gpus)
    for path, service in job.spec.services.items():
        if not service.served_by_rljob and service.url is None and service.local is None:
            lines.append(
                f"spec.{path}.template: a container cannot be run on this machine; add local: {{command: […]}} beside "
                "it"
            )
    return lines


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
                yield from (f"{field} of {MAIN}" for field in container if field not in SUPPORTED_IN_MAIN)
                variables = container.get("env") or []
                yield from (f"{variable['name']} of {MAIN}" for variable in variables if "valueFrom" in variable)
