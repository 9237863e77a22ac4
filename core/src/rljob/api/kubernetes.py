"""Fields of a manifest that concern the Kubernetes cluster. `rljob run` prints the fields that have no effect."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from rljob.api.base import Label, Labels, Model, Name, Quantity, ResourceName, Url
from rljob.api.field_metadata import FieldMeta

NO_PODS = "there are no pods to place"
NO_POLICIES = "there are no NetworkPolicies on one machine"
NO_PROFILES = "profiles are settings of a cluster"
LOCAL_CACHE = "models are kept in a directory of this machine"


AccessMode: TypeAlias = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]
ClassName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
"""Name of a StorageClass: a DNS subdomain."""


class LedgerVolume(Model):
    """A volume of its own for the ledger. Only the coordinator mounts it, with the access mode `ReadWriteOnce`."""

    size: Quantity = "10Gi"
    """Size of the PersistentVolumeClaim."""
    class_name: ClassName | None = None
    """StorageClass of the claim. Default: the default class of the cluster, not that of the storage."""


class Storage(Model):
    """The job's storage, which contains the paths `job://PATH`. For `rljob run` it is the run directory."""

    size: Quantity | None = None
    """Size of the job's PersistentVolumeClaim. Default: the cluster setting."""
    class_name: ClassName | None = None
    """StorageClass of the claim. Default: the cluster setting."""
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=4)] | None = None
    """Access modes of the claim. Default: the cluster setting. Pods on several nodes need `ReadWriteMany`."""
    ledger: LedgerVolume | None = None
    """A volume of its own for the ledger, a SQLite database. Needed if the storage is a network file system (NFS,
    Lustre): SQLite may lose transactions there. Samples and checkpoints stay in the storage. Default: the ledger is in
    the storage."""
    retention: Literal["Retain", "Delete"] = "Retain"
    """Whether the claims are kept when the job is deleted."""
    claim: Name | None = None
    """Name of an existing PersistentVolumeClaim to use instead of a new one."""


AcceleratorKind: TypeAlias = Literal["nvidia", "cpu"]


class Downloads(Model):
    """Download of models whose source is `hf://` or `s3://`. `rljob run` keeps them in the cache of huggingface_hub and
    in ~/.cache/rljob/models, or in the directory in RLJOB_MODEL_CACHE."""

    claim: Annotated[Name | None, FieldMeta(local=LOCAL_CACHE)] = None
    """Name of an existing PersistentVolumeClaim for the models, which several jobs can share. Default: the job's
    storage."""
    empty_dir: Annotated[bool, FieldMeta(local=LOCAL_CACHE)] = False
    """Keep the models in an emptyDir of each pod instead: every pod of the trainer, the engines and the runner
    downloads them."""
    hub_endpoint: Url | None = None
    """Address of the Hugging Face Hub or of a mirror. Default: HF_ENDPOINT, else https://huggingface.co."""
    s3_endpoint: Url | None = None
    """Address of the S3 service, also for `checkpoints.uri`. Default: AWS_ENDPOINT_URL, else AWS."""
    secret: Annotated[Name | None, FieldMeta(local="HF_TOKEN and the variables of AWS in your environment apply")] = (
        None
    )
    """Name of a Secret with any of the keys HF_TOKEN, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and
    AWS_DEFAULT_REGION. Each key becomes a variable of the pods that download, and of the trainer with
    `checkpoints.uri`."""


PROFILE_ON_CPU = "a role on the CPU has no accelerator; remove it, or set kind: auto"


class Accelerator(Model):
    """The device type of a role."""

    kind: Literal["auto", "nvidia", "cpu"] = "auto"
    """`auto`: accelerators if there are any, else the CPU. In a cluster a setting of the cluster decides."""
    profile: Annotated[Name | None, FieldMeta(reader="pods", local=NO_PROFILES)] = None
    """Profile of the cluster, which its administrators define for each kind of accelerator: resource, nodes, network
    adapters. The role then has accelerators also with `auto`. Default: NVIDIA GPUs of any node."""


GPUS = "nvidia.com/gpu"
"""Extended resource under which NVIDIA's device plugin offers GPUs."""


class Rdma(Model):
    """RDMA network adapters that a device plugin assigns to pods."""

    resource: ResourceName
    """Extended resource: rdma/hca, vpc.amazonaws.com/efa."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Adapters per pod."""


GangProvider: TypeAlias = Literal["none", "kubernetes", "volcano", "coscheduling", "kueue"]
WITH_QUEUES = ("volcano", "kueue")
"""Providers that have queues."""


class Gang(Model):
    """Gang scheduling: the trainer and `replicas.min` engines of each pool get nodes together or not at all."""

    provider: GangProvider | None = None
    """What makes sure of it. `none`: nothing. `kubernetes`: kube-scheduler, with a PodGroup of scheduling.k8s.io.
    `volcano`, `coscheduling` (scheduler-plugins): another scheduler, with its own PodGroup. `kueue`: Kueue admits the
    whole job, with a Workload. Default: the cluster setting."""
    queue: Name | None = None
    """Queue of `volcano` (default: its queue `default`), or LocalQueue of `kueue`, which needs one."""


class Topology(Model):
    """Topology-aware placement of the gang's pods."""

    key: Annotated[Label, Field(min_length=1)]
    """Key of a node label. All pods of the gang run on nodes with the same value of this label."""


class Peer(Model):
    """Pods that may connect to the job's pods."""

    name: Name
    """Name of this entry."""
    namespace_labels: Labels = {}
    """Labels of the pods' namespace. Default: the job's own namespace."""
    pod_labels: Labels = {}
    """Labels of the pods. Default: all pods of the namespace."""


class Destination(Model):
    """An IP address range."""

    name: Name
    """Name of this entry."""
    cidr: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]+$", max_length=63)]
    """Address range in CIDR notation: 10.0.0.0/8."""


class Egress(Model):
    """Destinations that the job's pods may connect to, besides each other and the cluster's DNS."""

    policy: Literal["Any", "Listed"] = "Any"
    """`Any`: all destinations. `Listed`: the ranges in `to`."""
    to: Annotated[list[Destination], Field(max_length=64)] = []
    """Destinations allowed with `policy: Listed`."""


class Network(Model):
    """NetworkPolicies of the job."""

    policy: Literal["Enabled", "Disabled"] = "Enabled"
    """Whether NetworkPolicies restrict connections to the job's pods."""
    allow_from: Annotated[list[Peer], Field(max_length=64)] = []
    """Pods that may read the coordinator's status, metrics and web page."""
    egress: Egress = Egress()
    """Outgoing connections."""
    nodes: Annotated[list[Destination], Field(max_length=64)] = []
    """Addresses of nodes. Pods with `hostNetwork` use their node's address; only this list lets policies admit them."""
