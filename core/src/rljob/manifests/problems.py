"""Checks of a valid manifest that apply only in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob.api.algorithm_functions import FUNCTIONS
from rljob.api.engine_hosts import ON_CPU
from rljob.api.engine_registry import image_of
from rljob.api.model_address import is_remote
from rljob.api.models import RLJob
from rljob.api.pod_models import MAIN, main_container
from rljob.api.replica_checks import gang_problems
from rljob.manifests.accelerator_profiles import unknown_profiles
from rljob.manifests.gang import ELASTIC, MOST_POD_SETS, gang_provider
from rljob.manifests.inputs import Cluster


def problems(job: RLJob, cluster: Cluster | None = None) -> list[str]:
    """Return one message for each field with a value that is invalid in a cluster.

    Args:
        job: a valid manifest.
        cluster: settings of the cluster; None: they are not known, and names of profiles are not checked.
    """
    return [
        *_paths(job),
        *_user_code(job),
        *_engine_images(job),
        *_containers(job),
        *_pools(job),
        *_host_network(job),
        *_processes(job),
        *_ray_commands(job),
        *_transport(job),
        *(_gang(job, cluster) if cluster is not None else ()),
        *(unknown_profiles(job, cluster.accelerator_profiles) if cluster is not None else ()),
        *(_hosts_on_cpu(job) if cluster is not None and cluster.accelerator == "cpu" else ()),
    ]


def _gang(job: RLJob, cluster: Cluster) -> Iterator[str]:
    """Check the gang provider of the cluster, where the manifest names none, and the number of roles."""
    provider = gang_provider(job, cluster)
    if job.spec.scheduling.gang.provider is None:
        for problem in gang_problems(job.spec, provider):
            yield f"spec.{problem}; the cluster's gang provider is {provider}"
    downloads = any(is_remote(model.source) for model in job.spec.models)
    roles = 3 + (job.spec.initializer is not None or downloads) + len(job.spec.rollouts)
    roles += sum(service.url is None for service in job.spec.services.values())
    if provider == "kueue" and roles > MOST_POD_SETS:
        yield (
            f"spec.scheduling.gang.provider: kueue admits at most {MOST_POD_SETS} roles, and the job has {roles}; use "
            "fewer pools, rewards and environments, or another provider"
        )


def _hosts_on_cpu(job: RLJob) -> Iterator[str]:
    """Check the hosts of engines in a cluster where `accelerator: {kind: auto}` means CPU."""
    for i, pool in enumerate(job.spec.rollouts):
        if pool.hosts > 1 and pool.accelerator.kind == "auto" and pool.accelerator.profile is None:
            yield f"spec.rollouts[{i}].hosts: {ON_CPU}"


def _transport(job: RLJob) -> Iterator[str]:
    if job.spec.weight_sync.transport == "ipc":
        yield (
            "spec.weightSync.transport: ipc is for rljob run, because pods do not share memory; in a cluster set auto, "
            "gloo or nccl"
        )


def _paths(job: RLJob) -> Iterator[str]:
    locations: dict[str, str | None] = {
        f"models[{i}].source": model.source for i, model in enumerate(job.spec.models) if not is_remote(model.source)
    }
    for i, task in enumerate(job.spec.tasks):
        for kind, table in (("jsonl", task.data.jsonl), ("parquet", task.data.parquet)):
            if table is not None:
                locations[f"tasks[{i}].data.{kind}.path"] = table.path
                locations[f"tasks[{i}].data.{kind}.heldOutPath"] = table.held_out_path
        if task.data.datasets is not None:
            locations[f"tasks[{i}].data.datasets.path"] = task.data.datasets.path
    for field, location in locations.items():
        if location is not None and not location.startswith("job://"):
            yield (
                f"spec.{field}: {location!r} is a path of one machine, which is for rljob run; in a cluster put it "
                "into the job's storage and write job://PATH"
            )


def _user_code(job: RLJob) -> Iterator[str]:
    """Check that a role which loads code of a user's own package has an image with the package in its template."""
    spec = job.spec
    trainer = {f"algorithm.{name}": getattr(spec.algorithm, name) for name in FUNCTIONS}
    trainer["trainer.backend"] = spec.trainer.backend
    uses = [("trainer", spec.trainer.template, field, value) for field, value in trainer.items()]
    for i, task in enumerate(spec.tasks):
        agent = None if task.agent is None else task.agent.function
        uses += [
            ("runner", spec.runner.template, f"tasks[{i}].loop", task.loop),
            ("runner", spec.runner.template, f"tasks[{i}].agent.function", agent),
            ("runner", spec.runner.template, f"tasks[{i}].groupFilter.function", task.group_filter.function),
        ]
    for field, service in spec.services.items():
        uses.append((field, service.template, f"{field}.function", service.function))
    for i, pool in enumerate(spec.rollouts):
        uses.append((f"rollouts[{i}]", pool.template, f"rollouts[{i}].engine", pool.engine))
    for role, template, field, value in uses:
        if value is not None and ":" in value and not main_container(template).get("image"):
            yield (
                f"spec.{role}.template: {field.removeprefix(f'{role}.')} needs an image that has the package of "
                f"{value}; set the image of its container {MAIN}"
            )


def _engine_images(job: RLJob) -> Iterator[str]:
    for i, pool in enumerate(job.spec.rollouts):
        built_in = ":" not in pool.engine
        if built_in and not image_of(pool.engine) and not main_container(pool.template).get("image"):
            yield (
                f"spec.rollouts[{i}].template: rljob publishes no image with {pool.engine}; build one "
                f"(rollout-image/{pool.engine}/Dockerfile) and set the image of its container {MAIN}"
            )


def _containers(job: RLJob) -> Iterator[str]:
    """Check that a service of the user's own has a container with an image."""
    for field, service in job.spec.services.items():
        if service.served_by_rljob or service.url is not None:
            continue
        if service.template is None:
            yield (
                f"spec.{field}.local: is for rljob run; in a cluster give the service's container in template, or its "
                "url"
            )
        elif not main_container(service.template).get("image"):
            yield f"spec.{field}.template: has no image; set the image of its container {MAIN}, or set builtin"


def _pools(job: RLJob) -> Iterator[str]:
    names = {pool.name for pool in job.spec.rollouts}
    for i, pool in enumerate(job.spec.rollouts):
        other = pool.name.removesuffix(f"-{ELASTIC}")
        if other != pool.name and other in names:
            yield (
                f"spec.rollouts[{i}].name: {pool.name} is the name of the elastic engines of pool {other}; "
                "choose another name"
            )


def _host_network(job: RLJob) -> Iterator[str]:
    """Check hostNetwork in templates: such pods have their node's address, which policies for the job's pods block."""
    spec = job.spec
    with_field = {"trainer": spec.trainer.template}
    with_field |= {f"rollouts[{i}]": pool.template for i, pool in enumerate(spec.rollouts)}
    for field, template in with_field.items():
        if _has_host_network(template):
            yield f"spec.{field}.template.spec.hostNetwork: governed by rljob; set spec.{field}.hostNetwork instead"
    if spec.network.policy == "Disabled" or spec.network.nodes:
        return
    others = {"runner": spec.runner.template, "coordinator": spec.coordinator.template}
    others |= {field: service.template for field, service in spec.services.items()}
    for field, template in others.items():
        if _has_host_network(template):
            yield (
                f"spec.{field}.template.spec.hostNetwork: network policies would block such pods; give the "
                "addresses of nodes in network.nodes, set network.policy: Disabled, or remove it"
            )


def _processes(job: RLJob) -> Iterator[str]:
    """Check that PID 1 is the container's own first process, because a probe ignores files older than PID 1."""
    spec = job.spec
    probed = {"trainer": spec.trainer.template, "runner": spec.runner.template}
    probed |= {f"rollouts[{i}]": pool.template for i, pool in enumerate(spec.rollouts)}
    for field, template in probed.items():
        for shared in ("shareProcessNamespace", "hostPID"):
            if ((template or {}).get("spec") or {}).get(shared):
                yield (
                    f"spec.{field}.template.spec.{shared}: the probes of this role need a process namespace of "
                    "its own for the container; remove it"
                )


def _ray_commands(job: RLJob) -> Iterator[str]:
    """Check that a template does not replace the commands of an engine that spans hosts: its pods have two."""
    for i, pool in enumerate(job.spec.rollouts):
        for field in ("command", "args"):
            if pool.hosts > 1 and main_container(pool.template).get(field) is not None:
                yield (
                    f"spec.rollouts[{i}].template: {field} of container {MAIN} would replace the different commands of "
                    "the pods of an engine that spans hosts; remove it"
                )


def _has_host_network(template: dict[str, Any] | None) -> bool:
    return bool(((template or {}).get("spec") or {}).get("hostNetwork"))
