"""Types of Kubernetes objects with only the fields that decisions need, decoded directly from the API's JSON.

Caches hold these instead of whole objects, so thousands of pods need little memory. All are read-only. A time that is
not known is ``null`` in the API, for example when a container ended while its node was away.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Camel(msgspec.Struct, rename="camel", gc=False, omit_defaults=True, frozen=True):
    pass


class OwnerReference(_Camel, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(_Camel, frozen=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []


class ObjectCondition(_Camel, frozen=True):
    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class Terminated(_Camel, frozen=True):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class Waiting(_Camel, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerState(_Camel, frozen=True):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Camel, frozen=True):
    name: str
    image: str = ""
    ready: bool = False
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(_Camel, frozen=True):
    phase: str = ""
    conditions: list[ObjectCondition] = []
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []


class PodSpec(_Camel, frozen=True):
    node_name: str = ""


class Pod(_Camel, frozen=True):
    """A pod of a job."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Child(msgspec.Struct, frozen=True):
    """An object of a job that is not a pod. ``body``: the whole object without managedFields. ``scaled_by``: the field
    manager, other than the operator, that owns the replicas of an RLJobScale."""

    kind: str
    metadata: Meta
    body: dict[str, Any]
    scaled_by: str = ""
