"""The pod template of every role, its probes, and the user's template merged over it.

Pods meet the restricted Pod Security Standard: no root, no privileges, a read-only root file system with an emptyDir at
/tmp. Commands and arguments contain no port, path or address: processes read them from RLJOB_* variables, which
`rljob run` sets to other values.

Loading may take any time: no probe kills a process before it serves for the first time. After that, a process whose
event loop has not run for failurePolicy.hangSeconds is killed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.pod_models import MAIN, PORT, PORT_NAME, main_container
from rljob.manifests import names
from rljob.manifests.gang import with_flavor
from rljob.manifests.inputs import Object
from rljob.manifests.job_objects import KEY
from rljob.manifests.merge import merge
from rljob.manifests.model_downloads import (
    STORAGE_DIRECTORY,
    copy_variables,
    credentials,
    model_variables,
    model_volumes,
)
from rljob.manifests.names import claim_name, dns_name, secret_name
from rljob.manifests.render_context import RenderContext, RoleKey, Volume
from rljob.protocol.environment import ACCELERATOR, RAY_TOKEN_FILE

JOB_DIRECTORY = "/etc/rljob/job"
TOKEN_DIRECTORY = "/etc/rljob/token"
PROBE_DIRECTORY = "/run/rljob"
TOKEN_FILES = {
    "RLJOB_TOKEN_FILE": "token",
    "RLJOB_REWARD_TOKEN_FILE": "reward-token",
    "RLJOB_ENVIRONMENT_TOKEN_FILE": "environment-token",
    "RLJOB_POOL_TOKEN_FILE": "pool-token",
    "RLJOB_TOKENS": "tokens.json",
    RAY_TOKEN_FILE: "ray-token",
}
"""Variable of a pod → the file in TOKEN_DIRECTORY that it names."""
GRACE_SECONDS = 30
READABLE = 0o444
NO_FAILURE_LIMIT = 2**31 - 1
PROBE_START_SECONDS = 5
PROBE_PERIOD_SECONDS = 10
PROBE_TIMEOUT_SECONDS = 10
"""Timeout of an HTTP or TCP probe."""
EXEC_PROBE_TIMEOUT_SECONDS = 30
"""Timeout of an exec probe: an overloaded node starts a program slowly."""
LIVENESS_FAILURES = 3
"""Number of consecutive exec probe failures until a container is killed."""


@dataclass(frozen=True)
class PodSettings:
    """The role-specific settings of a pod."""

    role: RoleKey
    image: str
    """Component whose image the pod runs; empty: the template's image."""
    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    """Variable → field path of the pod."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Variable of TOKEN_FILES → key of the job's Secret that is mounted as its file."""
    volumes: Sequence[Volume] = ()
    reads_models: bool = False
    """Whether the process reads models, which it downloads if they are remote."""
    copies_checkpoints: bool = False
    """Whether the process copies checkpoints to ``spec.checkpoints.uri``."""
    writes: bool = True
    """Whether the pod may write to the job's storage."""
    serves: bool = False
    """Whether the process listens on rljob's port."""
    probes: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    spec_fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the PodSpec."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None
    """The user's template."""
    inherited: Mapping[str, Any] | None = None
    """Fields of the accelerator's profile or of another role's template; ``template`` wins over them."""


def pod_template(ctx: RenderContext, pod: PodSettings) -> Object:
    """Return the pod template of a role with the user's template merged over it, and the flavor of Kueue.

    Raises:
        ValueError: the template contradicts the flavor.
    """
    metadata = {
        "labels": {**ctx.labels(pod.role), **pod.labels},
        "annotations": {names.ROLE_HASH: pod.role.hash, **pod.annotations},
    }
    merged = merge(merge({"metadata": metadata, "spec": _spec(ctx, pod)}, pod.inherited), pod.template)
    _drop_replaced_requests(merged, pod)
    for container in (*merged["spec"]["containers"], *merged["spec"].get("initContainers", ())):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return with_flavor(merged, ctx.target.flavors.get(pod.role.name))


def _drop_replaced_requests(merged: Object, pod: PodSettings) -> None:
    """Remove rljob's request of a resource if a template sets only its limit, which is then also the request."""
    own = main_container(merge(dict(pod.inherited or {}), pod.template)).get("resources") or {}
    limits, requests = own.get("limits") or {}, own.get("requests") or {}
    main = next(each for each in merged["spec"]["containers"] if each["name"] == MAIN)
    if rendered := main.get("resources", {}).get("requests"):
        kept = {name: value for name, value in rendered.items() if name not in limits or name in requests}
        main["resources"] = {**main["resources"], "requests": kept}


def coordinator_url(ctx: RenderContext) -> str:
    """Return the coordinator's address."""
    return service_url(ctx, ctx.name("coordinator"))


def service_url(ctx: RenderContext, service: str) -> str:
    """Return the address of a service of the job."""
    return f"http://{dns_name(service, ctx.target.namespace, ctx.cluster.domain)}:{PORT}"


def _spec(ctx: RenderContext, pod: PodSettings) -> dict[str, Any]:
    volumes = [*_volumes(ctx, pod), *(model_volumes(ctx) if pod.reads_models else ()), *pod.volumes]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _security(ctx.cluster.user),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [_container(ctx, pod, volumes)],
        "volumes": [volume for volume, _ in volumes],
        **pod.spec_fields,
    }
    if ctx.job.spec.scheduling.priority_class_name:
        spec["priorityClassName"] = ctx.job.spec.scheduling.priority_class_name
    if ctx.cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in ctx.cluster.image_pull_secrets]
    return spec


def _security(user: int | None) -> dict[str, Any]:
    """Return the security context of a pod. ``user``: None: the cluster assigns user and groups."""
    ids = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {
        "runAsNonRoot": True,
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container(ctx: RenderContext, pod: PodSettings, volumes: Sequence[Volume]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": MAIN}
    if pod.image:
        container["image"] = ctx.cluster.images[pod.image]
        if ctx.cluster.image_pull_policy:
            container["imagePullPolicy"] = ctx.cluster.image_pull_policy
    if pod.command:
        container["command"] = [*pod.command]
    container["env"] = _environment(ctx, pod)
    if pod.serves:
        container["ports"] = [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}]
    container |= pod.probes
    if pod.resources:
        container["resources"] = dict(pod.resources)
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    fixed = {JOB_DIRECTORY, TOKEN_DIRECTORY} | (set() if pod.writes else {STORAGE_DIRECTORY})
    container["volumeMounts"] = [
        {"name": volume["name"], "mountPath": path} | ({"readOnly": True} if path in fixed else {})
        for volume, path in volumes
    ]
    return container


def _environment(ctx: RenderContext, pod: PodSettings) -> list[dict[str, Any]]:
    values = {
        "RLJOB_JOB": f"{JOB_DIRECTORY}/{KEY}",
        "RLJOB_STORAGE": STORAGE_DIRECTORY,
        "RLJOB_HEARTBEAT": f"{PROBE_DIRECTORY}/heartbeat",
        "RLJOB_READY": f"{PROBE_DIRECTORY}/ready",
        "RLJOB_COORDINATOR": coordinator_url(ctx),
        ACCELERATOR: ctx.cluster.accelerator,
    }
    if pod.serves:
        values["RLJOB_LISTEN"] = f":{PORT}"  # all addresses of both families: a pod may have only an IPv6 address
    values |= {variable: f"{TOKEN_DIRECTORY}/{TOKEN_FILES[variable]}" for variable in pod.tokens}
    # Images have no passwd entry for this user, and libraries read HOME and USER.
    if pod.reads_models:
        values |= model_variables(ctx)
    if pod.copies_checkpoints:
        values |= copy_variables(ctx)
    values |= {**pod.variables, "HOME": "/tmp", "USER": "rljob"}
    downloads = pod.reads_models and ctx.downloads_models
    uses_servers = downloads or (pod.copies_checkpoints and ctx.copies_checkpoints)
    fields = {"RLJOB_HOST": "status.podIP", "RLJOB_INSTANCE": "metadata.name", **pod.fields}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *(credentials(ctx) if uses_servers else ()),
    ]


def _volumes(ctx: RenderContext, pod: PodSettings) -> list[Volume]:
    job = ctx.job
    claim = claim_name(job.metadata.name, job.spec.storage.claim)
    volumes: list[Volume] = [
        ({"name": "rljob-job", "configMap": {"name": ctx.name("job"), "defaultMode": READABLE}}, JOB_DIRECTORY),
        ({"name": "rljob-storage", "persistentVolumeClaim": {"claimName": claim}}, STORAGE_DIRECTORY),
        ({"name": "rljob-life", "emptyDir": {}}, PROBE_DIRECTORY),
        ({"name": "tmp", "emptyDir": {}}, "/tmp"),
    ]
    if pod.tokens:
        secret = {
            "secretName": secret_name(job.metadata.name, ctx.target.uid),
            "items": [{"key": key, "path": TOKEN_FILES[variable]} for variable, key in pod.tokens.items()],
            "defaultMode": READABLE,
        }
        volumes.append(({"name": "rljob-token", "secret": secret}, TOKEN_DIRECTORY))
    return volumes


def http_probes(hang_seconds: float) -> dict[str, Any]:
    """Return the probes of an rljob server. A server that answers /healthz is alive."""
    alive = {"httpGet": {"path": "/healthz", "port": PORT_NAME}}
    ready = {"httpGet": {"path": "/readyz", "port": PORT_NAME}}
    timing = {"periodSeconds": PROBE_START_SECONDS, "timeoutSeconds": PROBE_TIMEOUT_SECONDS}
    return {
        "startupProbe": {**alive, **timing, "failureThreshold": NO_FAILURE_LIMIT},
        "livenessProbe": _liveness(alive, math.ceil(hang_seconds / PROBE_PERIOD_SECONDS)),
        "readinessProbe": {**ready, **timing},
    }


def file_probes(hang_seconds: float) -> dict[str, Any]:
    """Return the probes of a process without a server: a program in its container reads the process's files.

    A pod is ready when its own process can work, independent of other processes. Therefore a drain evicts one engine
    after the other, and a restart of the coordinator makes no engine unready.

    The liveness probe needs three consecutive failures: when the clock is set forward, every heartbeat is old until the
    next one, and a probe that a busy node cannot start in time counts as failed.
    """
    command = ["python", "-m", "rljob.protocol.health_probe"]
    timing = {"periodSeconds": PROBE_PERIOD_SECONDS, "timeoutSeconds": EXEC_PROBE_TIMEOUT_SECONDS}
    alive = {"exec": {"command": [*command, "alive", f"{hang_seconds:g}"]}}
    ready = {"exec": {"command": [*command, "ready"]}}
    return {
        "livenessProbe": {**alive, **timing, "failureThreshold": LIVENESS_FAILURES},
        "readinessProbe": {**ready, **timing, "failureThreshold": 1},
    }


def socket_probes() -> dict[str, Any]:
    """Return the probes of a user's server: readiness only, which means that the server listens."""
    ready = {"tcpSocket": {"port": PORT_NAME}}
    return {"readinessProbe": {**ready, "periodSeconds": PROBE_START_SECONDS, "timeoutSeconds": PROBE_TIMEOUT_SECONDS}}


def _liveness(alive: dict[str, Any], failures: int) -> dict[str, Any]:
    return {
        **alive,
        "periodSeconds": PROBE_PERIOD_SECONDS,
        "timeoutSeconds": PROBE_TIMEOUT_SECONDS,
        "failureThreshold": max(1, failures),
    }
