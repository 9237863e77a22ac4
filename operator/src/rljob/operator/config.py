"""Settings of the operator: a YAML or JSON file, which RLJOB_OPERATOR_CONFIG names. The chart writes it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from rljob.api.base import Model
from rljob.api.errors import sentences
from rljob.kube.access import Access, in_cluster
from rljob.kube.kubeconfig import from_kubeconfig
from rljob.manifests.inputs import Cluster, ClusterSettings, read_cluster
from rljob.protocol.startup import has_port

_Line = Annotated[str, Field(min_length=1, max_length=1024)]
_Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


CONFIG = "RLJOB_OPERATOR_CONFIG"
"""Variable with the name of the file of the settings."""
MIN_WRITE_SECONDS = 1.0
"""Writes with a shorter time-out fail on a busy API server."""


class LeaseSettings(Model):
    """Election of the leader."""

    name: _Line = "rljob-operator"
    """Name of the Lease in the operator's namespace."""
    duration_seconds: Annotated[float, Field(ge=1, le=3600)] = 15.0
    """Time without a renewal after which another operator takes the lease."""
    renew_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Time for which a leader tries to renew before it stops."""
    retry_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """Pause between attempts to take or renew the lease."""

    @model_validator(mode="after")
    def _check_order(self) -> LeaseSettings:
        if not self.retry_seconds < self.renew_seconds < self.duration_seconds:
            raise ValueError("retrySeconds: must be less than renewSeconds, and that less than durationSeconds")
        if self.write_seconds < MIN_WRITE_SECONDS:
            least = f"at least {MIN_WRITE_SECONDS:g} more than renewSeconds"
            raise ValueError(f"durationSeconds: must be {least}: the difference is the time-out of writes")
        return self

    @property
    def write_seconds(self) -> float:
        """Time-out of one write. The last write may start just before `renewSeconds` are over, and must end
        before another operator may lead."""
        return self.duration_seconds - self.renew_seconds


class WebhookSettings(Model):
    """Admission webhook: an RLJob with an invalid spec is refused when it is written."""

    listen: _Line = ":9443"
    """host:port of the webhook; see `listen` of the operator."""
    certificate: _Line = "/etc/webhook/tls.crt"
    """PEM file with the certificate of the server. It is read again when it changes."""
    key: _Line = "/etc/webhook/tls.key"
    """PEM file with its private key."""

    @model_validator(mode="after")
    def _check(self) -> WebhookSettings:
        _check_listen(self.listen)
        return self


class OperatorSettings(Model):
    """Settings of the operator."""

    cluster: ClusterSettings = ClusterSettings()
    """Settings of the cluster that rendering needs."""
    namespaces: Annotated[list[_Namespace], Field(max_length=64)] = []  # noqa: RUF012 (pydantic copies it)
    """Namespaces whose RLJobs are reconciled; empty: all."""
    workers: Annotated[int, Field(ge=1, le=256)] = 16
    """Jobs that are reconciled concurrently."""
    connections: Annotated[int, Field(ge=1, le=1024)] = 32
    """Concurrent requests to the API server."""
    request_seconds: Annotated[float, Field(gt=0, le=300)] = 15.0
    """Time-out of one request to the API server; of a write: lease.durationSeconds - lease.renewSeconds,
    if that is less."""
    listen: _Line = ":8080"
    """host:port of /metrics and /readyz; without a host: all addresses, of IPv4 and IPv6; port 0: a free port."""
    lease: LeaseSettings = LeaseSettings()
    """Election of the leader."""
    webhook: WebhookSettings | None = None
    """Admission webhook. Default: none."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of log messages."""

    @model_validator(mode="after")
    def _check(self) -> OperatorSettings:
        _check_listen(self.listen)
        return self

    def for_rendering(self) -> Cluster:
        """Return the settings of the cluster for rendering."""
        return read_cluster(self.cluster.model_dump(mode="json", by_alias=True))


def _check_listen(listen: str) -> None:
    if not has_port(listen):
        raise ValueError(f"listen: must be host:port, such as :8080, not {listen!r}")


@dataclass(frozen=True)
class Start:
    """Parameters of an operator."""

    settings: OperatorSettings
    access: Access
    namespace: str
    """Namespace of the operator and of its Lease."""
    identity: str
    """Identity of this process among the candidates for the Lease."""


def read_settings(path: Path) -> OperatorSettings:
    """Return the settings in a file.

    Raises:
        ValueError: one line per error.
    """
    try:
        # JSON is YAML.
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: the settings cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict | None):
        raise ValueError(f"{path}: the settings are not a mapping; see the values of the chart")
    try:
        return OperatorSettings.model_validate_json(json.dumps(data or {}), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in sentences(error, OperatorSettings))) from None


def start_of(namespaces: Collection[str] | None = None) -> Start:
    """Read the environment and the settings that it names.

    RLJOB_OPERATOR_CONFIG names the file of the settings, KUBECONFIG a kubeconfig (default: the pod's service account).
    POD_NAME and POD_NAMESPACE are those of the pod.

    Args:
        namespaces: that kopf watches (its options -n); empty: all; None: those of the settings.

    Raises:
        ValueError: one of them is invalid.
    """
    config, kubeconfig = os.environ.get(CONFIG), os.environ.get("KUBECONFIG")
    settings = read_settings(Path(config)) if config else OperatorSettings(namespaces=[*(namespaces or ())])
    if namespaces is not None and {*settings.namespaces} != {*namespaces}:
        watched = " ".join(f"-n {name}" for name in settings.namespaces) or "-A"
        raise ValueError(f"{config}: namespaces: kopf watches other namespaces: run kopf with {watched}")
    access = from_kubeconfig(Path(kubeconfig)) if kubeconfig else in_cluster()
    identity = f"{os.environ.get('POD_NAME') or platform.node()}_{os.urandom(4).hex()}"
    return Start(settings, access, os.environ.get("POD_NAMESPACE", "default"), identity)
