"""Inputs of rendering besides the job: the cluster settings, and the state of the job (attempt, replicas).

The settings are values of the chart, which the operator reads from a file. For `rljob render` a user writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints, ValidationError

from rljob.api.base import Model, Name, Quantity
from rljob.api.errors import sentences
from rljob.api.kubernetes import AccessMode, GangProvider, Peer
from rljob.manifests.accelerator_profiles import AcceleratorProfile, RequestsPerGpu

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object as JSON."""

COMPONENTS = ("coordinator", "runner", "trainer", "rollout", "rewards", "environments")
"""Components with an image. The initializer runs in the trainer image; :mod:`rljob.api.engine_registry` has the images
of engines."""


@dataclass(frozen=True)
class Cluster:
    """Cluster settings: the chart's values, which the operator reads from a file."""

    images: Mapping[str, str] = field(default_factory=lambda: {name: f"rljob-{name}" for name in COMPONENTS})
    """Component → image."""
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    image_pull_secrets: tuple[str, ...] = ()
    domain: str = "cluster.local"
    """DNS domain of the cluster."""
    storage_class: str = ""
    """StorageClass of claims; empty: the cluster's default."""
    storage_size: str = "10Gi"
    """Size of claims of jobs that set none."""
    access_modes: tuple[str, ...] = ("ReadWriteMany",)
    """Access modes of claims. The default lets pods on several nodes share a job's storage."""
    accelerator: Literal["nvidia", "cpu"] = "nvidia"
    """Device type of `accelerator: {kind: auto}`."""
    gang: GangProvider = "none"
    """Gang provider of jobs that set none."""
    gang_scheduler: str = ""
    """schedulerName of the pods of trainer and engines with the provider coscheduling or volcano; empty: the default
    scheduler with coscheduling, `volcano` with volcano."""
    requests_per_gpu: Mapping[str, str] = field(default_factory=lambda: {"cpu": "2", "memory": "8Gi"})
    """Resource → what pods of trainer and engines request of it for each GPU."""
    accelerator_profiles: Mapping[str, AcceleratorProfile] = field(default_factory=dict)
    """Name of a profile, which jobs use, → profile."""
    user: int | None = 65532
    """User and group of every process, and group of the volumes: the `nonroot` user of distroless images. None: the
    cluster assigns them, as OpenShift does from a range of the namespace."""
    allow_from: tuple[Peer, ...] = ()
    """Pods that may read the coordinator of every job, besides those of `spec.network.allowFrom`, and the metrics of
    its rewards and environments: Prometheus."""


@dataclass(frozen=True)
class Flavor:
    """What the ResourceFlavors that Kueue assigned to a role add to its pods."""

    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes: additional entries of nodeSelector."""
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class RenderTarget:
    """Cluster, namespace and state for which a job is rendered."""

    cluster: Cluster = Cluster()
    namespace: str = "default"
    uid: str = ""
    """UID of the RLJob, which owns the objects; empty: no owner references (`rljob render`)."""
    attempt: int = 1
    """Attempt of the trainer."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Role → desired pods, between min and max of the role. Roles that are not in it have min."""
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    """Role → the nodes to which Kueue has admitted its pods. Roles that are not in it may run on any node."""
    priority: int | None = None
    """Value of the job's PriorityClass, for the order of Kueue's queues; None: it is not known."""


_ShortText = Annotated[str, StringConstraints(min_length=1, max_length=253)]
_Defaults = Cluster()


class Images(Model):
    """Component → image."""

    coordinator: _ShortText = _Defaults.images["coordinator"]
    runner: _ShortText = _Defaults.images["runner"]
    trainer: _ShortText = _Defaults.images["trainer"]
    rollout: _ShortText = _Defaults.images["rollout"]
    rewards: _ShortText = _Defaults.images["rewards"]
    environments: _ShortText = _Defaults.images["environments"]


class ClusterSettings(Model):
    """The fields of :class:`~rljob.manifests.inputs.Cluster`, all optional."""

    images: Images = Images()
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = _Defaults.image_pull_policy
    image_pull_secrets: Annotated[tuple[_ShortText, ...], Field(max_length=64)] = ()
    domain: _ShortText = _Defaults.domain
    storage_class: Annotated[str, Field(max_length=253)] = _Defaults.storage_class
    storage_size: Quantity = _Defaults.storage_size
    access_modes: Annotated[tuple[AccessMode, ...], Field(min_length=1, max_length=4)] = ("ReadWriteMany",)
    accelerator: Literal["nvidia", "cpu"] = _Defaults.accelerator
    gang: GangProvider = _Defaults.gang
    gang_scheduler: Annotated[str, Field(max_length=253)] = _Defaults.gang_scheduler
    requests_per_gpu: RequestsPerGpu = RequestsPerGpu()
    accelerator_profiles: Annotated[dict[Name, AcceleratorProfile], Field(max_length=64)] = {}  # noqa: RUF012 (copied)
    user: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = _Defaults.user
    allow_from: Annotated[tuple[Peer, ...], Field(max_length=64)] = ()


def read_cluster(data: Mapping[str, Any]) -> Cluster:
    """Return the settings in ``data``, whose keys are camelCase as in a file.

    Raises:
        ValueError: the settings are invalid; one line per problem, with the setting and the cause.
    """
    try:
        read = ClusterSettings.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ValueError("\n".join(sentences(error, ClusterSettings))) from None
    return Cluster(
        images={name: getattr(read.images, name) for name in COMPONENTS},
        image_pull_policy=read.image_pull_policy,
        image_pull_secrets=read.image_pull_secrets,
        domain=read.domain,
        storage_class=read.storage_class,
        storage_size=read.storage_size,
        access_modes=read.access_modes,
        accelerator=read.accelerator,
        gang=read.gang,
        gang_scheduler=read.gang_scheduler,
        user=read.user,
        allow_from=read.allow_from,
        accelerator_profiles=read.accelerator_profiles,
        requests_per_gpu={"cpu": read.requests_per_gpu.cpu, "memory": read.requests_per_gpu.memory},
    )
