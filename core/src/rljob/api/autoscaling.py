"""Replicas of a role, and what changes their number within the bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import Model, Text, Url
from rljob.api.field_metadata import FieldMeta

FIXED = "the number of processes does not change on one machine"
READ = FieldMeta(reader="objects", local=FIXED)


class Replicas(Model):
    """Number of replicas of a role."""

    min: Annotated[int, Field(ge=1, le=1024), FieldMeta(reader="objects")] = 1
    """Minimum, and initial number."""
    max: Annotated[
        Annotated[int, Field(ge=1, le=1024)] | None,
        FieldMeta(reader="objects", local="min processes are started"),
    ] = None
    """Maximum that `kubectl scale` and autoscalers may set. Default: `min`."""


class ServiceReplicas(Replicas):
    """Number of replicas of a service, which may be 0 while the service has no work."""

    min: Annotated[int, Field(ge=0, le=1024), FieldMeta(reader="objects")] = 1
    """Minimum, and initial number. With 0, and `max` of 1 or more, the service has no pod while it has no load."""


class Keda(Model):
    """A ScaledObject of KEDA that reads the load of the role from Prometheus."""

    server_address: Annotated[Url, READ]
    """Address of Prometheus: http://prometheus.monitoring.svc:9090."""
    query: Annotated[Annotated[Text, Field(min_length=1)] | None, READ] = None
    """PromQL query of the load. Default: the metric `rljob_role_load` of the job's coordinator, found by the labels
    `namespace` and `pod` that a PodMonitor sets."""


class Autoscaling(Model):
    """What changes the number of replicas between `replicas.min` and `replicas.max`; no effect if they are equal."""

    provider: Annotated[Literal["builtin", "keda", "none"], READ] = "builtin"
    """`builtin`: the operator. It stops when something else, for example `kubectl scale` or a HorizontalPodAutoscaler,
    changes the replicas of the RLJobScale. `keda`: a ScaledObject of KEDA, which the operator creates. `none`: nothing
    of rljob."""
    scale_out_seconds: Annotated[int, Field(ge=0, le=3600), READ] = 30
    """The load must need more replicas for this long before there are more."""
    scale_in_seconds: Annotated[int, Field(ge=0, le=3600), READ] = 300
    """The load must need fewer replicas for this long before there are fewer."""
    keda: Keda | None = None
    """Settings of `provider: keda`, which needs them."""


class LoadAutoscaling(Autoscaling):
    """The same for a role whose load is a number of samples or episodes."""

    target_in_flight: Annotated[Annotated[int, Field(ge=1, le=1_000_000)] | None, READ] = None
    """Load per pod that decides how many pods there are. Default: 8 for each of the `processes` of a reward, 256 for an
    environment, 1,024 for the runner."""
