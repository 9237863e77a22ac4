"""What a manifest says about the cluster a job runs in. `rljob run` needs none of it and says so."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rljob.api.base import Label, Labels, Model, Name, Quantity, ResourceName, Text


class Storage(Model):
    """The job's storage, to which `job://PATH` refers; for `rljob run` it is the run directory."""

    size: Quantity | None = None
    """Size of the volume that is claimed for the job; the cluster's default when left out."""
    retention: Literal["Retain", "Delete"] = "Retain"
    """Whether the volume stays when the job is deleted."""
    claim: Name | None = None
    """Name of an existing PersistentVolumeClaim to use instead."""
    uri: Annotated[Text, Field(min_length=1)] | None = None
    """Place in an object store to use instead: s3://BUCKET/PATH."""


class Accelerator(Model):
    """What a part computes on."""

    kind: Literal["auto", "nvidia", "cpu"] = "auto"
    """`auto`: the accelerators there are, else the processor."""


GPUS = "nvidia.com/gpu"
"""Resource of nodes that NVIDIA's device plugin makes of GPUs."""


class Rdma(Model):
    """Network adapters that read and write the memory of other nodes, as a device plugin gives them to pods."""

    resource: ResourceName
    """Resource of nodes: rdma/hca, vpc.amazonaws.com/efa."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """How many of it one pod gets."""


class Gang(Model):
    """Pods that start together or not at all: the trainer and the least engines of each pool."""

    provider: Literal["none", "kubernetes", "volcano", "coscheduling", "kueue"] | None = None
    """Who schedules the gang; the cluster's default when left out."""
    queue: Name | None = None
    """Queue of the provider, where it has queues."""


class Topology(Model):
    """How near one another the pods of the gang are placed."""

    key: Annotated[Label, Field(min_length=1)]
    """Label of nodes; all pods of the gang run on nodes with one value of it."""


class Peer(Model):
    """Pods that may connect to the job's."""

    name: Name
    """Name of this entry."""
    namespace_labels: Labels = {}
    """Labels of their namespace; the job's own namespace when left out."""
    pod_labels: Labels = {}
    """Labels of the pods; all of the namespace when left out."""


class Destination(Model):
    """A range of addresses."""

    name: Name
    """Name of this entry."""
    cidr: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]+$", max_length=63)]
    """Range of addresses: 10.0.0.0/8."""


class Egress(Model):
    """What the job's pods may connect to besides one another and the cluster's name service."""

    policy: Literal["Any", "Listed"] = "Any"
    """`Any`: everything. `Listed`: what `to` lists."""
    to: Annotated[list[Destination], Field(max_length=64)] = []
    """Addresses allowed with `policy: Listed`."""


class Network(Model):
    """Who may talk to the job's pods."""

    policy: Literal["Enabled", "Disabled"] = "Enabled"
    """Whether NetworkPolicies keep others away from the job's pods."""
    allow_from: Annotated[list[Peer], Field(max_length=64)] = []
    """Pods that may read the coordinator's status, metrics and page."""
    egress: Egress = Egress()
    """Connections outwards."""
    nodes: Annotated[list[Destination], Field(max_length=64)] = []
    """Addresses of nodes. Pods with `hostNetwork` have their node's: to policies they are strangers but for this."""
