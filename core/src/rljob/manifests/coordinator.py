"""The coordinator: a StatefulSet of one pod behind a Service, and its ServiceAccount.

The ServiceAccount may read the coordinator's own RLJob and write its status, and nothing else.
"""

from __future__ import annotations

from rljob.api.pod_models import PORT, PORT_NAME
from rljob.manifests.names import ledger_claim_name
from rljob.manifests.pods import PodSettings, http_probes, pod_template
from rljob.manifests.render_context import RenderContext, RenderedRole, Volume
from rljob.manifests.resources import lost_node_tolerations
from rljob.protocol.environment import LEDGER_DIRECTORY

RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}}
"""Requests of small servers. Pods without requests are evicted first when a node runs out of memory."""
LEDGER_PATH = "/var/lib/rljob-ledger"
"""Mount path of the ledger's volume."""
RBAC = "rbac.authorization.k8s.io"


def coordinator(ctx: RenderContext) -> RenderedRole:
    """Return the coordinator's role."""
    job = ctx.job
    template = job.spec.coordinator.template
    role = ctx.role_key("coordinator", own=template)
    name = ctx.name("coordinator")
    ledger = _ledger_volumes(ctx)
    pod = PodSettings(
        role,
        image="coordinator",
        command=["python", "-m", "rljob.coordinator.main"],
        variables={
            "RLJOB_NAMESPACE": ctx.target.namespace,
            "RLJOB_JOB_NAME": job.metadata.name,
            "RLJOB_JOB_UID": ctx.target.uid,
            **({LEDGER_DIRECTORY: LEDGER_PATH} if ledger else {}),
        },
        volumes=ledger,
        tokens={"RLJOB_TOKENS": "coordinator"},
        serves=True,
        probes=http_probes(job.spec.failure_policy.hang_seconds),
        resources=RESOURCES,
        spec_fields={
            "serviceAccountName": name,
            "automountServiceAccountToken": True,
            "tolerations": lost_node_tolerations(),
        },
        template=template,
    )
    ports = [{"name": PORT_NAME, "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    service = {"spec": {"selector": ctx.selector(role), "ports": ports}}
    spec = {
        "replicas": 1,
        "serviceName": name,
        "podManagementPolicy": "Parallel",  # otherwise a pod that cannot start blocks its replacement
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": ctx.selector(role)},
        "template": pod_template(ctx, pod),
    }
    return RenderedRole(
        role.name,
        role.kind,
        role.hash,
        (
            ctx.object(role, "Service", name, service),
            ctx.object(role, "StatefulSet", name, {"spec": spec}, api="apps/v1"),
        ),
        desired=1,
    )


def _ledger_volumes(ctx: RenderContext) -> list[Volume]:
    """Return the volume of the ledger, unless the ledger is in the job's storage."""
    if ctx.job.spec.storage.ledger is None:
        return []
    claim = {"claimName": ledger_claim_name(ctx.job.metadata.name)}
    return [({"name": "rljob-ledger", "persistentVolumeClaim": claim}, LEDGER_PATH)]


def access(ctx: RenderContext) -> RenderedRole:
    """Return the role of the coordinator's ServiceAccount."""
    role, name = ctx.role_key("access"), ctx.name("coordinator")
    group, own = ctx.job.api_version.partition("/")[0], [ctx.job.metadata.name]
    rules = [
        {"apiGroups": [group], "resources": ["rljobs"], "resourceNames": own, "verbs": ["get", "list", "watch"]},
        {"apiGroups": [group], "resources": ["rljobs/status"], "resourceNames": own, "verbs": ["get", "patch"]},
    ]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": ctx.target.namespace}
    binding = {"roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name}, "subjects": [subject]}
    objects = (
        ctx.object(role, "ServiceAccount", name, {"automountServiceAccountToken": False}),
        ctx.object(role, "Role", name, {"rules": rules}, api=f"{RBAC}/v1"),
        ctx.object(role, "RoleBinding", name, binding, api=f"{RBAC}/v1"),
    )
    return RenderedRole(role.name, role.kind, role.hash, objects)
