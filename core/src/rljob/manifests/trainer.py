"""The trainer: an Indexed Job for each attempt, which fails as a whole, and a headless Service for its pods' names."""

from __future__ import annotations

from rljob.api.pods import MAIN
from rljob.api.roles import Trainer
from rljob.manifests import labels as l
from rljob.manifests import probes
from rljob.manifests.context import Role
from rljob.manifests.deployments import disruption_budget
from rljob.manifests.gang import GANG, near_the_gang, tier
from rljob.manifests.hardware import hardware
from rljob.manifests.hashes import digest, of_pods
from rljob.manifests.names import dns_name
from rljob.manifests.pods import Pod, pod_template
from rljob.manifests.scene import Scene
from rljob.protocol.environment import MASTER, NODE_RANK, NODES, RENDEZVOUS_ID
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

"""Exit code that says that no restart helps."""
HOST_PORTS = range(20_000, 30_000)
"""Of nodes, below those that Kubernetes gives services and that the kernel gives connections."""
RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def trainer(scene: Scene) -> Role:
    """Return the trainer's role, of the context's attempt."""
    spec, attempt = scene.job.spec.trainer, str(scene.context.attempt)
    role = scene.identity("trainer", own=of_pods(spec))
    service, name = scene.name("trainer"), scene.name("trainer", attempt)
    asked = hardware(scene, spec, spec.processes_per_node)
    pod = Pod(
        role,
        image="trainer",
        command=_command(spec),
        variables={
            NODES: str(spec.nodes),
            MASTER: _master(scene, f"{name}-0.{service}"),
            RENDEZVOUS_ID: digest(scene.context.uid, name),
            **asked.variables,
        },
        fields={NODE_RANK: RANK_FIELD},
        token="trainer",
        volumes=asked.volumes,
        probes=probes.files(scene.job.spec.failure_policy.hang_seconds),
        resources=asked.resources,
        more={
            "restartPolicy": "Never",
            "subdomain": service,
            **({"tolerations": [*asked.tolerations]} if asked.tolerations else {}),
            **asked.more,
            **near_the_gang(scene, GANG),
        },
        labels={l.ATTEMPT: attempt, **tier(GANG)},
        template=spec.template,
    )
    headless = {
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": scene.selector(role)},
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
            "template": pod_template(scene, pod),
        }
    }
    objects = [
        scene.object(role, "Service", service, headless),
        scene.object(role, "Job", name, body, api="batch/v1", labels={l.ATTEMPT: attempt}),
    ]
    if scene.job.spec.failure_policy.disruption == "Block":
        objects.append(disruption_budget(scene, role, min_available=spec.nodes))
    return Role(role.name, role.kind, role.hash, tuple(objects), desired=spec.nodes)


def _master(scene: Scene, pod: str) -> str:
    """Return where the trainer's nodes meet: at their first pod.

    On the network of a node others may have the usual port. What is taken costs an attempt, and the next one has
    another port.
    """
    name = dns_name(pod, scene.context.namespace, scene.cluster.domain)
    if not scene.job.spec.trainer.host_network:
        return name
    number = int(digest(scene.context.uid, pod), 16) % len(HOST_PORTS)
    return f"{name}:{HOST_PORTS[number]}"


def configuration_error() -> dict[str, object]:
    """Return the condition of a Job's rule on the exit code that no restart helps against."""
    return {"containerName": MAIN, "operator": "In", "values": [CONFIGURATION_ERROR]}


def _command(spec: Trainer) -> list[str]:
    if spec.nodes * spec.processes_per_node == 1:
        return ["python", "-m", "rljob.trainer.main"]
    return ["python", "-m", "rljob.trainer.launch", str(spec.processes_per_node)]
