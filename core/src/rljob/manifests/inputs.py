"""Inputs of rendering besides the job: the cluster's settings, and the moment in the job's life.

The settings are the chart's values, which the operator reads from a file; for `rljob render` a user writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints, ValidationError

from rljob.api.base import Model, Quantity
from rljob.api.errors import sentences

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object as JSON."""

PARTS = ("coordinator", "runner", "trainer", "rollout", "rewards")
"""Images; the initializer runs in the trainer image. Those of engines are named in :mod:`rljob.api.engine_registry`."""


@dataclass(frozen=True)
class Cluster:
    """Cluster settings: the chart's values, which the operator reads from a file."""

    images: Mapping[str, str] = field(default_factory=lambda: {part: f"rljob-{part}" for part in PARTS})
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
    """Access modes of claims; pods on several nodes share a job's storage."""
    accelerator: Literal["nvidia", "cpu"] = "nvidia"
    """Device type of `accelerator: {kind: auto}`."""
    gang: Literal["none"] = "none"
    """Gang provider of jobs that set none."""


@dataclass(frozen=True)
class RenderTarget:
    """Where and when a job is rendered."""

    cluster: Cluster = Cluster()
    namespace: str = "default"
    uid: str = ""
    """UID of the RLJob, which owns the objects; empty: no owner references (`rljob render`)."""
    attempt: int = 1
    """Attempt of the trainer."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Role → pods, between its min and max; min for roles that are missing."""


_Word = Annotated[str, StringConstraints(min_length=1, max_length=253)]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]
_Defaults = Cluster()


class Images(Model):
    """Component → image."""

    coordinator: _Word = _Defaults.images["coordinator"]
    runner: _Word = _Defaults.images["runner"]
    trainer: _Word = _Defaults.images["trainer"]
    rollout: _Word = _Defaults.images["rollout"]
    rewards: _Word = _Defaults.images["rewards"]


class ClusterSettings(Model):
    """The fields of :class:`~rljob.manifests.inputs.Cluster`, all optional."""

    images: Images = Images()
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = _Defaults.image_pull_policy
    image_pull_secrets: Annotated[tuple[_Word, ...], Field(max_length=64)] = ()
    domain: _Word = _Defaults.domain
    storage_class: Annotated[str, Field(max_length=253)] = _Defaults.storage_class
    storage_size: Quantity = _Defaults.storage_size
    access_modes: Annotated[tuple[AccessMode, ...], Field(min_length=1, max_length=4)] = ("ReadWriteMany",)
    accelerator: Literal["nvidia", "cpu"] = _Defaults.accelerator
    gang: Literal["none"] = _Defaults.gang


def read_cluster(data: Mapping[str, Any]) -> Cluster:
    """Return the settings in ``data``, whose keys are camelCase as in a file.

    Raises:
        ValueError: one line per problem: the setting and the cause.
    """
    try:
        read = ClusterSettings.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ValueError("\n".join(sentences(error, ClusterSettings))) from None
    return Cluster(
        images={part: getattr(read.images, part) for part in PARTS},
        image_pull_policy=read.image_pull_policy,
        image_pull_secrets=read.image_pull_secrets,
        domain=read.domain,
        storage_class=read.storage_class,
        storage_size=read.storage_size,
        access_modes=read.access_modes,
        accelerator=read.accelerator,
        gang=read.gang,
    )
