"""The coordinator: a StatefulSet of one behind a Service. It watches its own RLJob (access.py)."""

from __future__ import annotations

from rljob.api.pods import PORT, PORT_NAME
from rljob.manifests import probes
from rljob.manifests.context import Role
from rljob.manifests.pods import TOKENS_FILE, Pod, pod_template
from rljob.manifests.scene import Scene

RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}}
"""Of the servers that do little. A pod that asks for nothing is the first to go when a node runs short."""


def coordinator(scene: Scene) -> Role:
    """Return the coordinator's role."""
    job = scene.job
    template = job.spec.coordinator.template
    role = scene.identity("coordinator", own=template)
    name = scene.name("coordinator")
    pod = Pod(
        role,
        image="coordinator",
        command=["python", "-m", "rljob.coordinator.main"],
        variables={
            "RLJOB_NAMESPACE": scene.context.namespace,
            "RLJOB_JOB_NAME": job.metadata.name,
            "RLJOB_JOB_UID": scene.context.uid,
        },
        token="coordinator",
        token_file=TOKENS_FILE,
        serves=True,
        probes=probes.http(job.spec.failure_policy.hang_seconds),
        resources=RESOURCES,
        more={"serviceAccountName": name, "automountServiceAccountToken": True},
        template=template,
    )
    ports = [{"name": PORT_NAME, "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    service = {"spec": {"selector": scene.selector(role), "ports": ports}}
    spec = {
        "replicas": 1,
        "serviceName": name,
        "podManagementPolicy": "Parallel",  # else a pod that cannot start holds up the one that could
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": scene.selector(role)},
        "template": pod_template(scene, pod),
    }
    return Role(
        role.name,
        role.kind,
        role.hash,
        (
            scene.object(role, "Service", name, service),
            scene.object(role, "StatefulSet", name, {"spec": spec}, api="apps/v1"),
        ),
        desired=1,
    )
