"""The pod that every role has in common, its probes, and the user's template merged over it.

Pods meet the restricted Pod Security Standard: no root, no privileges, a read-only root file system with an emptyDir at
/tmp. Commands and arguments hold no port, path or address: processes read them from RLJOB_* variables, which
`rljob run` fills differently.

Loading may take any time: no probe kills a process before it serves for the first time. After that, a process whose
event loop has not run for failurePolicy.hangSeconds is killed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.pods import MAIN, PORT, PORT_NAME, main_container
from rljob.manifests import names
from rljob.manifests.inputs import Object
from rljob.manifests.job_objects import KEY
from rljob.manifests.merge import merge
from rljob.manifests.names import claim_name, dns_name, secret_name
from rljob.manifests.render_context import RenderContext, RoleKey

USER = 65532
"""User and group of every process; the customary nobody of images without a shell."""
JOB_DIRECTORY = "/etc/rljob/job"
STORAGE_DIRECTORY = "/var/lib/rljob"
TOKEN_DIRECTORY = "/etc/rljob/token"
LIFE_DIRECTORY = "/run/rljob"
TOKEN_FILE = "token"
TOKENS_FILE = "tokens.json"
GRACE_SECONDS = 30
READABLE = 0o444
NO_FAILURE_LIMIT = 2**31 - 1
PROBE_START_SECONDS = 5
PROBE_PERIOD_SECONDS = 10
PROBE_TIMEOUT_SECONDS = 10
"""Of one look at a server."""
EXEC_PROBE_TIMEOUT_SECONDS = 30
"""Of one look by a program: on a node that is overloaded a container takes long to start one."""
LIVENESS_FAILURES = 3
"""Of such looks in a row that count."""


Volume = tuple[dict[str, Any], str]
"""A volume and where it is mounted."""


@dataclass(frozen=True)
class Pod:
    """What is particular to the pods of a role."""

    role: RoleKey
    image: str
    """Part whose image it runs; empty: the template's."""
    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    """Variable → field of the pod."""
    token: str = ""
    """Key of the job's Secret that it may read."""
    token_file: str = TOKEN_FILE
    volumes: Sequence[Volume] = ()
    writes: bool = True
    """It may write to the job's storage."""
    serves: bool = False
    """It listens on our port."""
    probes: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the PodSpec."""
    labels: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None
    """The user's."""
    inherited: Mapping[str, Any] | None = None
    """What of another role's template holds here too, under the user's for this one."""


def pod_template(ctx: RenderContext, pod: Pod) -> Object:
    """Return the pod template of a role with the user's template merged over it."""
    metadata = {
        "labels": {**ctx.labels(pod.role), **pod.labels},
        "annotations": {names.ROLE_HASH: pod.role.hash},
    }
    merged = merge(merge({"metadata": metadata, "spec": _spec(ctx, pod)}, pod.inherited), pod.template)
    _yield_requests(merged, pod)
    for container in (*merged["spec"]["containers"], *merged["spec"].get("initContainers", ())):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return merged


def _yield_requests(merged: Object, pod: Pod) -> None:
    """Remove what we request of a resource where the template sets its limit alone, which is a request too then."""
    said = main_container(dict(pod.template or {})).get("resources") or {}
    limits, requests = said.get("limits") or {}, said.get("requests") or {}
    main = next(each for each in merged["spec"]["containers"] if each["name"] == MAIN)
    if ours := main.get("resources", {}).get("requests"):
        kept = {name: value for name, value in ours.items() if name not in limits or name in requests}
        main["resources"] = {**main["resources"], "requests": kept}


def coordinator_url(ctx: RenderContext) -> str:
    """Return the coordinator's address."""
    return service_url(ctx, ctx.name("coordinator"))


def service_url(ctx: RenderContext, service: str) -> str:
    """Return the address of a service of the job."""
    return f"http://{dns_name(service, ctx.context.namespace, ctx.cluster.domain)}:{PORT}"


def _spec(ctx: RenderContext, pod: Pod) -> dict[str, Any]:
    volumes = [*_volumes(ctx, pod), *pod.volumes]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [_container(ctx, pod, volumes)],
        "volumes": [volume for volume, _ in volumes],
        **pod.more,
    }
    if ctx.job.spec.scheduling.priority_class_name:
        spec["priorityClassName"] = ctx.job.spec.scheduling.priority_class_name
    if ctx.cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in ctx.cluster.image_pull_secrets]
    return spec


def _container(ctx: RenderContext, pod: Pod, volumes: Sequence[Volume]) -> dict[str, Any]:
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


def _environment(ctx: RenderContext, pod: Pod) -> list[dict[str, Any]]:
    values = {
        "RLJOB_JOB": f"{JOB_DIRECTORY}/{KEY}",
        "RLJOB_STORAGE": STORAGE_DIRECTORY,
        "RLJOB_HEARTBEAT": f"{LIFE_DIRECTORY}/heartbeat",
        "RLJOB_READY": f"{LIFE_DIRECTORY}/ready",
        "RLJOB_COORDINATOR": coordinator_url(ctx),
    }
    if pod.serves:
        values["RLJOB_LISTEN"] = f":{PORT}"  # all addresses of both families: a pod may have an IPv6 address alone
    if pod.token:
        variable = "RLJOB_TOKENS" if pod.token_file == TOKENS_FILE else "RLJOB_TOKEN_FILE"
        values[variable] = f"{TOKEN_DIRECTORY}/{pod.token_file}"
    # HOME and USER: no image has an entry for this user, and libraries ask for both.
    values |= {**pod.variables, "HOME": "/tmp", "USER": "rljob"}
    fields = {"RLJOB_HOST": "status.podIP", "RLJOB_INSTANCE": "metadata.name", **pod.fields}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def _volumes(ctx: RenderContext, pod: Pod) -> list[Volume]:
    job = ctx.job
    claim = claim_name(job.metadata.name, job.spec.storage.claim)
    volumes: list[Volume] = [
        ({"name": "rljob-job", "configMap": {"name": ctx.name("job"), "defaultMode": READABLE}}, JOB_DIRECTORY),
        ({"name": "rljob-storage", "persistentVolumeClaim": {"claimName": claim}}, STORAGE_DIRECTORY),
        ({"name": "rljob-life", "emptyDir": {}}, LIFE_DIRECTORY),
        ({"name": "tmp", "emptyDir": {}}, "/tmp"),
    ]
    if pod.token:
        secret = {
            "secretName": secret_name(job.metadata.name, ctx.context.uid),
            "items": [{"key": pod.token, "path": pod.token_file}],
            "defaultMode": READABLE,
        }
        volumes.append(({"name": "rljob-token", "secret": secret}, TOKEN_DIRECTORY))
    return volumes


def http_probes(hang_seconds: float) -> dict[str, Any]:
    """Return the probes of a server of ours: what answers moves."""
    look = {"httpGet": {"path": "/healthz", "port": PORT_NAME}}
    ready = {"httpGet": {"path": "/readyz", "port": PORT_NAME}}
    often = {"periodSeconds": PROBE_START_SECONDS, "timeoutSeconds": PROBE_TIMEOUT_SECONDS}
    return {
        "startupProbe": {**look, **often, "failureThreshold": NO_FAILURE_LIMIT},
        "livenessProbe": _liveness(look, math.ceil(hang_seconds / PROBE_PERIOD_SECONDS)),
        "readinessProbe": {**ready, **often},
    }


def file_probes(hang_seconds: float) -> dict[str, Any]:
    """Return the probes of a part that nobody dials: a program in its container looks at the files it touches.

    A pod is ready when the part itself can do its work, whether or not others let it: so a drain takes one engine
    after the other, and a coordinator that restarts makes no engine unready.

    Of liveness the third failure in a row counts: a clock that is put forward makes every heartbeat old until the next
    beat, and a look that a busy node cannot start in time counts as one that failed.
    """
    look = ["python", "-m", "rljob.protocol.health_probe"]
    often = {"periodSeconds": PROBE_PERIOD_SECONDS, "timeoutSeconds": EXEC_PROBE_TIMEOUT_SECONDS}
    alive = {"exec": {"command": [*look, "alive", f"{hang_seconds:g}"]}}
    ready = {"exec": {"command": [*look, "ready"]}}
    return {
        "livenessProbe": {**alive, **often, "failureThreshold": LIVENESS_FAILURES},
        "readinessProbe": {**ready, **often, "failureThreshold": 1},
    }


def socket_probes() -> dict[str, Any]:
    """Return the probes of a server of the user's, of which nothing is known but that it listens."""
    ready = {"tcpSocket": {"port": PORT_NAME}}
    return {"readinessProbe": {**ready, "periodSeconds": PROBE_START_SECONDS, "timeoutSeconds": PROBE_TIMEOUT_SECONDS}}


def _liveness(look: dict[str, Any], failures: int) -> dict[str, Any]:
    return {
        **look,
        "periodSeconds": PROBE_PERIOD_SECONDS,
        "timeoutSeconds": PROBE_TIMEOUT_SECONDS,
        "failureThreshold": max(1, failures),
    }
