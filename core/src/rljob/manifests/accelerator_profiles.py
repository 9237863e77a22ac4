"""Accelerator profiles: what a pod needs to use a kind of accelerator and its network, as data of the platform team.

A job names a profile (`accelerator: {profile: h100}`), and the settings of the cluster define it. The rest of a
manifest stays the same on every cloud. rljob knows no vendor: charts/rljob/profiles has examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rljob.api.base import Labels, Model, Quantity, ResourceName
from rljob.api.kubernetes import GPUS
from rljob.api.models import RLJob
from rljob.api.pod_models import PodTemplate, check_template

PerDevice = Annotated[int, Field(ge=1, le=64)]


class RequestsPerGpu(Model):
    """Requests of pods of trainer and engines for each GPU."""

    cpu: Quantity = "2"
    memory: Quantity = "8Gi"


class AcceleratorProfile(Model):
    """What pods with a kind of accelerator need. All fields are optional."""

    resource: ResourceName = GPUS
    """Extended resource of one device; a pod requests one for each of its processes."""
    requests_per_gpu: Annotated[RequestsPerGpu | None, Field(alias="requestsPerGPU")] = None
    """Requests of a pod for each device. Default: those of the cluster."""
    resources_per_gpu: Annotated[dict[ResourceName, PerDevice], Field(alias="resourcesPerGPU")] = {}  # noqa: RUF012 (copied)
    """Further extended resources for each device: {vpc.amazonaws.com/efa: 4}."""
    resources_per_pod: dict[ResourceName, PerDevice] = Field(default_factory=dict)
    """Further extended resources for each pod: {rdma/hca_shared_devices_a: 1}."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels of the nodes."""
    tolerations: list[dict[str, Any]] = Field(default_factory=list)
    """Tolerations, besides that of the resource's own taint."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the main container; `nccl` and the template of the job win over them."""
    template: PodTemplate | None = None
    """PodTemplateSpec for everything else, merged over the pod before the template of the job: annotations, volumes,
    runtimeClassName; sidecars as `initContainers` with `restartPolicy: Always`, which end with the pod."""

    @model_validator(mode="after")
    def _check(self) -> AcceleratorProfile:
        check_template({"spec": {"tolerations": self.tolerations}})
        return self

    def limits(self, devices: int) -> dict[str, str]:
        """Return resource → amount of a pod with ``devices`` devices."""
        more = {name: count * devices for name, count in self.resources_per_gpu.items()} | self.resources_per_pod
        return {name: str(count) for name, count in {self.resource: devices, **more}.items()}


def unknown_profiles(job: RLJob, known: Mapping[str, AcceleratorProfile]) -> Iterator[str]:
    """Yield one message for each role with a profile that the cluster does not have."""
    roles = {"trainer": job.spec.trainer} | {f"rollouts[{i}]": pool for i, pool in enumerate(job.spec.rollouts)}
    for field, role in roles.items():
        if role.accelerator.profile is not None and role.accelerator.profile not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none (acceleratorProfiles of the chart)"
            yield f"spec.{field}.accelerator.profile: the cluster has no profile {role.accelerator.profile}; {there}"
