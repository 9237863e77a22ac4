"""Roles that run as Jobs: the initializer and the trainer.

The initializer runs in the trainer's image and completes before any pod with an accelerator is created. It also
downloads remote models, so that no accelerator waits for them. The trainer has an Indexed Job for each attempt, which
fails as a whole, and a headless Service for the names of its pods.
"""

from __future__ import annotations

from typing import Any

from rljob.api.pod_models import MAIN, main_container
from rljob.api.roles import Trainer
from rljob.manifests import names
from rljob.manifests.deployments import disruption_budget
from rljob.manifests.gang import GANG, membership
from rljob.manifests.hashes import digest, of_pods
from rljob.manifests.names import dns_name
from rljob.manifests.pods import PodSettings, file_probes, pod_template
from rljob.manifests.render_context import RenderContext, RenderedRole
from rljob.manifests.resources import gang_affinity, lost_node_tolerations, resources, tier_label
from rljob.protocol.environment import MASTER, NODE_RANK, NODES, RENDEZVOUS_ID, SEED
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

HOST_PORTS = range(20_000, 30_000)
"""Ports of the rendezvous with hostNetwork, below the NodePort range and the kernel's ephemeral range."""
RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
RETRIES = 3
INHERITED_FIELDS = ("image", "imagePullPolicy", "env", "envFrom")


def trainer(ctx: RenderContext) -> RenderedRole:
    """Return the trainer's role for the context's attempt."""
    spec, attempt = ctx.job.spec.trainer, str(ctx.target.attempt)
    role = ctx.role_key("trainer", own=of_pods(spec), reads_models=True)
    service, name = ctx.name("trainer"), ctx.name("trainer", attempt)
    requested = resources(ctx, spec, spec.processes_per_node)
    member = membership(ctx, role, GANG)
    pod = PodSettings(
        role,
        image="trainer",
        command=_command(spec),
        variables={
            NODES: str(spec.nodes),
            MASTER: _master(ctx, f"{name}-0.{service}"),
            RENDEZVOUS_ID: digest(ctx.target.uid, name),
            **requested.variables,
        },
        fields={NODE_RANK: RANK_FIELD},
        tokens={"RLJOB_TOKEN_FILE": "trainer"},
        volumes=requested.volumes,
        reads_models=True,
        copies_checkpoints=True,
        probes=file_probes(ctx.job.spec.failure_policy.hang_seconds),
        resources=requested.resources,
        spec_fields={
            "restartPolicy": "Never",
            "subdomain": service,
            "tolerations": [*lost_node_tolerations(), *requested.tolerations],
            **requested.spec_fields,
            **gang_affinity(ctx, GANG),
            **member.spec_fields,
        },
        labels={names.ATTEMPT: attempt, **tier_label(GANG), **member.labels},
        annotations=member.annotations,
        template=spec.template,
        inherited=requested.template,
    )
    headless = {
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": ctx.selector(role)},
    }
    body = {
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "FailJob", "onExitCodes": configuration_error()},
                ]
            },
            "template": pod_template(ctx, pod),
        }
    }
    objects = [
        ctx.object(role, "Service", service, headless),
        ctx.object(role, "Job", name, body, api="batch/v1", labels={names.ATTEMPT: attempt}),
    ]
    if ctx.job.spec.failure_policy.disruption == "Block":
        objects.append(disruption_budget(ctx, role, min_available=spec.nodes))
    return RenderedRole(role.name, role.kind, role.hash, tuple(objects), desired=spec.nodes)


def _master(ctx: RenderContext, pod: str) -> str:
    """Return the rendezvous address of the trainer's nodes: the first pod.

    With hostNetwork the default port may be in use on the node. If the port is in use, the attempt fails, and the next
    attempt has another port.
    """
    name = dns_name(pod, ctx.target.namespace, ctx.cluster.domain)
    if not ctx.job.spec.trainer.host_network:
        return name
    number = int(digest(ctx.target.uid, pod), 16) % len(HOST_PORTS)
    return f"{name}:{HOST_PORTS[number]}"


def configuration_error() -> dict[str, object]:
    """Return the onExitCodes condition of a configuration error."""
    return {"containerName": MAIN, "operator": "In", "values": [CONFIGURATION_ERROR]}


def _command(spec: Trainer) -> list[str]:
    if spec.nodes * spec.processes_per_node == 1:
        return ["python", "-m", "rljob.trainer.main"]
    return ["python", "-m", "rljob.trainer.launch", str(spec.processes_per_node)]


def initializer(ctx: RenderContext) -> RenderedRole | None:
    """Return the initializer's role, if the job has an initializer or remote models."""
    spec = ctx.job.spec
    if spec.initializer is None and not ctx.downloads_models:
        return None
    inherited = _inherited_from_trainer(spec.trainer.template)
    own, command = (spec.initializer.template, spec.initializer.command) if spec.initializer else (None, [])
    role = ctx.role_key("initializer", own=[inherited, own], reads_models=True)
    pod = PodSettings(
        role,
        image="trainer",
        command=["python", "-m", "rljob.trainer.initialize", "--", *command],
        variables={SEED: str(spec.seed)},
        reads_models=True,
        spec_fields={"restartPolicy": "Never"},
        template=own,
        inherited=inherited,
    )
    body = {
        "spec": {
            "backoffLimit": RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "FailJob", "onExitCodes": configuration_error()},
                ]
            },
            "template": pod_template(ctx, pod),
        }
    }
    job = ctx.object(role, "Job", ctx.name("initializer"), body, api="batch/v1")
    return RenderedRole(role.name, role.kind, role.hash, (job,), desired=1)


def _inherited_from_trainer(template: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields that the initializer inherits from the trainer's template: image, pull settings, variables."""
    main = {key: value for key, value in main_container(template).items() if key in INHERITED_FIELDS}
    spec: dict[str, Any] = {"containers": [{"name": MAIN, **main}]}
    secrets = ((template or {}).get("spec") or {}).get("imagePullSecrets")
    return {"spec": spec | ({"imagePullSecrets": secrets} if secrets else {})}
