"""The golden files: the rendered objects of every role, in a cluster with GPUs and in a cluster without GPUs; those of
trainer and engines with each accelerator profile that the chart ships, of gangs with each provider, and of engines that
span hosts.

After an intended change, update the files and read the difference:

    python -m core.tests.goldens --update
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rljob.api.kubernetes import WITH_QUEUES
from rljob.api.load import load
from rljob.api.models import RLJob
from rljob.api.yaml_loader import read_yaml
from rljob.manifests import render
from rljob.manifests.inputs import COMPONENTS, Cluster, Flavor, RenderTarget, read_cluster
from rljob.manifests.render import to_yaml

DIRECTORY = Path(__file__).parent / "golden"
PROFILES = Path(__file__).parents[2] / "charts/rljob/profiles"
"""Values of the chart with one profile each."""
JOB = DIRECTORY / "job.yaml"

CONTEXTS = {
    "gpu": RenderTarget(
        namespace="research",
        uid="0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
        attempt=3,
        replicas={"rollout-main": 3},
    ),
    "cpu": RenderTarget(
        Cluster(
            images={part: f"localhost/rljob-{part}:dev" for part in COMPONENTS},
            image_pull_policy="Never",
            image_pull_secrets=("registry",),
            domain="cluster.test",
            storage_class="standard",
            access_modes=("ReadWriteOnce",),
            accelerator="cpu",
        ),
    ),
}


PLACED = {
    "spec": {
        "runtimeClassName": "gvisor",
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "nodeSelector": {"disk": "large"},
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        "containers": [{"name": "main", "resources": {"claims": [{"name": "gpus"}]}}],
    }
}
"""A template with fields that only schedulers read."""
GANG_TARGET = RenderTarget(
    Cluster(gang_scheduler="gangs"),
    "research",
    "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
    replicas={"rollout-main": 2},
    flavors={"trainer": Flavor({"pool": "h100"}, ({"key": "h100", "operator": "Exists", "effect": "NoSchedule"},))},
    priority=1000,
)


def texts() -> dict[str, str]:
    """Return file name → expected content."""
    job = load(JOB)
    texts = {
        f"{name}-{role.name}.yaml": to_yaml(role.objects)
        for name, context in CONTEXTS.items()
        for role in render(job, context)
    }
    texts |= {
        f"hosts-{role.name}.yaml": to_yaml(role.objects)
        for role in render(across_hosts(), CONTEXTS["gpu"])
        if role.kind in ("network", "rollout")
    }
    for path in sorted(PROFILES.glob("*.yaml")):
        cluster = read_cluster(read_yaml(path.read_bytes().decode()))
        (profile,) = cluster.accelerator_profiles
        roles = render(with_profile(profile), RenderTarget(cluster))
        texts |= {
            f"profile-{path.stem}-{role.name}.yaml": to_yaml(role.objects)
            for role in roles
            if role.kind in ("trainer", "rollout")
        }
    for provider in ("kubernetes", "volcano", "coscheduling", "kueue"):
        texts |= {
            f"gang-{provider}-{role.name}.yaml": to_yaml(role.objects)
            for role in render(with_gang(provider), GANG_TARGET if provider == "kueue" else without_flavors())
            if role.kind in ("group", "trainer", "rollout")
        }
    return texts


def without_flavors() -> RenderTarget:
    """Return the target of gangs for providers other than Kueue."""
    return dataclasses.replace(GANG_TARGET, flavors={})


def with_gang(provider: str) -> RLJob:
    """Return a job with a gang provider. Its templates have what concerns schedulers."""
    queue = ", queue: research" if provider in WITH_QUEUES else ""
    fixed = ["spec.rewards[0].replicas.max=null", "spec.rollouts[0].replicas.max=null", "spec.runner.replicas.max=null"]
    gang = [f"spec.scheduling.gang={{provider: {provider}{queue}}}", f"spec.trainer.template={json.dumps(PLACED)}"]
    return load(JOB, [*gang, *(fixed if provider == "kueue" else ())])


def across_hosts() -> RLJob:
    """Return a small job whose engines span two hosts: those of the policy, and a judge."""
    models = "[{name: policy, source: 'job://model'}, {name: judge, source: 'job://judge'}]"
    parallelism = "parallelism: {tensor: 8, pipeline: 2}"
    main = f"{{name: main, hosts: 2, {parallelism}, replicas: {{min: 2, max: 4}}}}"
    judge = f"{{name: judge, model: judge, hosts: 2, {parallelism}}}"
    return load(JOB, [f"spec.models={models}", f"spec.rollouts=[{main}, {judge}]"])


def with_profile(profile: str) -> RLJob:
    """Return a small job whose trainer and engines have a profile."""
    accelerator = f"{{profile: {profile}}}"
    fields = [f"spec.trainer.accelerator={accelerator}", f"spec.rollouts=[{{name: main, accelerator: {accelerator}}}]"]
    return load(
        JOB, [*fields, "spec.trainer.processesPerNode=8", "spec.trainer.rdma=null", "spec.trainer.template=null"]
    )


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    for old in (path for start in (*CONTEXTS, "hosts", "profile", "gang") for path in DIRECTORY.glob(f"{start}-*")):
        old.unlink()
    for name, text in texts().items():
        (DIRECTORY / name).write_text(text)
