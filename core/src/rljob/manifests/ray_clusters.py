"""Engines that span hosts: one RayCluster of KubeRay for each engine.

The head pod runs the rollout agent and the engine's server; worker pods hold the other part of the workers. Ray
connects them and starts the workers. KubeRay makes the pods of a RayCluster. rljob's operator replaces a RayCluster as
a whole when one of its pods ends, because an engine cannot work without one of its workers.

Source: KubeRay (ray.io/v1), controllers/ray/common/pod.go and utils/validation.go. What this module depends on:

- The first container of a template runs Ray: it is rljob's ``main``.
- With the annotation ``ray.io/overwrite-container-cmd`` KubeRay keeps the commands of the templates, and gives them
  its own command as the variable KUBERAY_GEN_RAY_START_CMD (``RAY_START`` of :mod:`rljob.protocol.environment`).
- KubeRay adds probes only to containers without probes, /dev/shm only to pods without it, and to worker pods an init
  container that waits for the head with image, variables, mounts and security context of the first container.
- Labels of a template stay, and pods get ``ray.io/cluster`` and ``ray.io/node-type``. The head's Service selects pods
  by KubeRay's own ``app.kubernetes.io/name`` too, so templates leave that label out.
- The head's Service has the ports of the first container of the head. A port named ``metrics`` is added if there is
  none.
- A name has at most 53 characters and begins with a letter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rljob.api.roles import Rollout
from rljob.manifests.inputs import Object
from rljob.manifests.names import RAY_CLUSTER
from rljob.manifests.pods import PodSettings, pod_template
from rljob.manifests.render_context import RenderContext, RoleKey
from rljob.protocol.environment import RAY_AUTH_MODE, RAY_TOKEN_FILE

API = "ray.io/v1"
OWN_COMMANDS = "ray.io/overwrite-container-cmd"
CLUSTER_LABEL, NODE_TYPE = "ray.io/cluster", "ray.io/node-type"
"""Labels of pods: the name of their RayCluster, and ``head`` or ``worker``."""
KUBERAY_NAME = "app.kubernetes.io/name"
"""Label of pods that KubeRay sets."""
HEAD = "head"
WORKERS = "workers"
"""Name of the only group of workers."""
RAY_TOKEN = "ray"
"""Key of the Secret with the token of Ray's own connections inside an engine. User code of the job never has it."""
OBJECT_STORE_BYTES = 256 << 20
"""Size of Ray's object store on each host. Weights and tokens do not pass through it."""
GCS_PORT, METRICS_PORT = 6379, 8081
"""Ports of Ray: of its head, and of metrics on every host. Frozen pools listen on rljob's port, KubeRay's default for
the latter."""
WORKER_COMMAND = ("python", "-m", "rljob.rollout.main", "--worker")


def ray_cluster(
    ctx: RenderContext, role: RoleKey, pool: Rollout, name: str, pod: PodSettings, labels: dict[str, str]
) -> Object:
    """Return the RayCluster of one engine.

    Args:
        ctx: of the rendering.
        role: of the pool.
        pool: the pool.
        name: of the RayCluster.
        pod: settings of a pod with an engine of one host.
        labels: of the RayCluster, which distinguish it from those of other engines of the pool.
    """
    head = replace(pod, tokens={**pod.tokens, RAY_TOKEN_FILE: RAY_TOKEN}, variables=_variables(pod))
    worker = replace(head, command=WORKER_COMMAND, tokens={RAY_TOKEN_FILE: RAY_TOKEN}, serves=False, reads_models=True)
    others = pool.hosts - 1
    spec = {
        "headGroupSpec": {
            "rayStartParams": {
                **_ray_parameters(pool),
                "port": str(GCS_PORT),
                "dashboard-host": "127.0.0.1",  # nothing outside the pod reads it
                "include-dashboard": "false",
            },
            "template": _template(ctx, head, {"gcs-server": GCS_PORT, "metrics": METRICS_PORT}),
        },
        "workerGroupSpecs": [
            {
                "groupName": WORKERS,
                "replicas": others,
                "minReplicas": others,
                "maxReplicas": others,
                "rayStartParams": _ray_parameters(pool),
                "template": _template(ctx, worker, {"metrics": METRICS_PORT}),
            }
        ],
    }
    return ctx.object(
        role, RAY_CLUSTER, name, {"spec": spec}, api=API, labels=labels, annotations={OWN_COMMANDS: "true"}
    )


def _template(ctx: RenderContext, pod: PodSettings, ports: Mapping[str, int]) -> Object:
    """Return the template of a group of pods."""
    template = pod_template(ctx, pod)
    labels = {name: value for name, value in template["metadata"]["labels"].items() if name != KUBERAY_NAME}
    main, *others = template["spec"]["containers"]
    own = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]
    containers = [{**main, "ports": [*main.get("ports", ()), *own]}, *others]
    return {
        "metadata": {**template["metadata"], "labels": labels},
        "spec": {**template["spec"], "containers": containers},
    }


def _ray_parameters(pool: Rollout) -> dict[str, str]:
    """Return the arguments of `ray start` on every host. vLLM asks Ray for one GPU for each worker."""
    return {
        "num-cpus": str(pool.devices),
        "num-gpus": str(pool.devices),
        "object-store-memory": str(OBJECT_STORE_BYTES),
        "metrics-export-port": str(METRICS_PORT),
    }


def _variables(pod: PodSettings) -> dict[str, Any]:
    """Return the variables of a pod. Ray 2.52 and later refuses connections without the token."""
    return {**pod.variables, RAY_AUTH_MODE: "token"}
