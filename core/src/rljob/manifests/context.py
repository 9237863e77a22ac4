"""What rendering needs to know besides the job: the cluster's settings, and what moment of the job's life it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object as JSON."""

PARTS = ("coordinator", "runner", "trainer", "rollout", "rewards")
"""Images; the initializer runs in the trainer's."""


@dataclass(frozen=True)
class Cluster:
    """Settings of the cluster: the chart's values, which the operator reads from a file."""

    images: Mapping[str, str] = field(default_factory=lambda: {part: f"rljob-{part}" for part in PARTS})
    """Part → image."""
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    image_pull_secrets: tuple[str, ...] = ()
    domain: str = "cluster.local"
    """Domain of the cluster's names."""
    storage_class: str = ""
    """Of claims; the cluster's default when empty."""
    storage_size: str = "10Gi"
    """Of claims of jobs that say none."""
    access_modes: tuple[str, ...] = ("ReadWriteMany",)
    """Of claims: pods on several nodes share a job's storage."""
    accelerator: Literal["nvidia", "cpu"] = "nvidia"
    """What `accelerator: {kind: auto}` stands for."""
    gang: Literal["none"] = "none"
    """Provider of jobs that name none."""


@dataclass(frozen=True)
class Context:
    """Where and when a job is rendered."""

    cluster: Cluster = Cluster()
    namespace: str = "default"
    uid: str = ""
    """Of the RLJob: owner of what is made; no owner references when empty (`rljob render`)."""
    attempt: int = 1
    """Of the trainer."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Role → pods, between its min and max; min where nothing is said."""


@dataclass(frozen=True)
class Role:
    """What is rendered for one role of a job.

    ``name``: storage, config, access, network, initializer, coordinator, runner, trainer, rollout-POOL, reward-NAME.
    ``kind``: the name without POOL and NAME.
    ``hash``: of the manifest's fields that the role's pods depend on (inputs, never the output; no replicas).
    """

    name: str
    kind: str
    hash: str
    objects: tuple[Object, ...]
    desired: int = 0
    """Pods, where the role has any."""
