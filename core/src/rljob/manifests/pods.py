"""The pod that every role has in common, and what a user's template makes of it.

Pods meet the restricted Pod Security Standard: no root, no privileges, a read-only root file system with an emptyDir at
/tmp. Commands and arguments hold no port, path or address: parts read them from RLJOB_* variables, which `rljob run`
fills differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.pods import MAIN, PORT, PORT_NAME, main_container
from rljob.manifests import labels as l
from rljob.manifests.context import Object
from rljob.manifests.job_config import KEY
from rljob.manifests.merge import merge
from rljob.manifests.names import claim_name, dns_name, secret_name
from rljob.manifests.scene import Identity, Scene

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

Volume = tuple[dict[str, Any], str]
"""A volume and where it is mounted."""


@dataclass(frozen=True)
class Pod:
    """What is particular to the pods of a role."""

    role: Identity
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


def pod_template(scene: Scene, pod: Pod) -> Object:
    """Return the pod template of a role with the user's template merged over it."""
    metadata = {
        "labels": {**scene.labels(pod.role), **pod.labels},
        "annotations": {l.ROLE_HASH: pod.role.hash},
    }
    merged = merge(merge({"metadata": metadata, "spec": _spec(scene, pod)}, pod.inherited), pod.template)
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


def coordinator_url(scene: Scene) -> str:
    """Return the coordinator's address."""
    return service_url(scene, scene.name("coordinator"))


def service_url(scene: Scene, service: str) -> str:
    """Return the address of a service of the job."""
    return f"http://{dns_name(service, scene.context.namespace, scene.cluster.domain)}:{PORT}"


def _spec(scene: Scene, pod: Pod) -> dict[str, Any]:
    volumes = [*_volumes(scene, pod), *pod.volumes]
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
        "containers": [_container(scene, pod, volumes)],
        "volumes": [volume for volume, _ in volumes],
        **pod.more,
    }
    if scene.job.spec.scheduling.priority_class_name:
        spec["priorityClassName"] = scene.job.spec.scheduling.priority_class_name
    if scene.cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in scene.cluster.image_pull_secrets]
    return spec


def _container(scene: Scene, pod: Pod, volumes: Sequence[Volume]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": MAIN}
    if pod.image:
        container["image"] = scene.cluster.images[pod.image]
        if scene.cluster.image_pull_policy:
            container["imagePullPolicy"] = scene.cluster.image_pull_policy
    if pod.command:
        container["command"] = [*pod.command]
    container["env"] = _environment(scene, pod)
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


def _environment(scene: Scene, pod: Pod) -> list[dict[str, Any]]:
    values = {
        "RLJOB_JOB": f"{JOB_DIRECTORY}/{KEY}",
        "RLJOB_STORAGE": STORAGE_DIRECTORY,
        "RLJOB_HEARTBEAT": f"{LIFE_DIRECTORY}/heartbeat",
        "RLJOB_READY": f"{LIFE_DIRECTORY}/ready",
        "RLJOB_COORDINATOR": coordinator_url(scene),
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


def _volumes(scene: Scene, pod: Pod) -> list[Volume]:
    job = scene.job
    claim = claim_name(job.metadata.name, job.spec.storage.claim)
    volumes: list[Volume] = [
        ({"name": "rljob-job", "configMap": {"name": scene.name("job"), "defaultMode": READABLE}}, JOB_DIRECTORY),
        ({"name": "rljob-storage", "persistentVolumeClaim": {"claimName": claim}}, STORAGE_DIRECTORY),
        ({"name": "rljob-life", "emptyDir": {}}, LIFE_DIRECTORY),
        ({"name": "tmp", "emptyDir": {}}, "/tmp"),
    ]
    if pod.token:
        secret = {
            "secretName": secret_name(job.metadata.name, scene.context.uid),
            "items": [{"key": pod.token, "path": pod.token_file}],
            "defaultMode": READABLE,
        }
        volumes.append(({"name": "rljob-token", "secret": secret}, TOKEN_DIRECTORY))
    return volumes
