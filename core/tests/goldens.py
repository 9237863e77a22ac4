"""The golden files: the rendered objects of every role, in a cluster with GPUs and in a cluster without GPUs; those of
trainer and engines with each accelerator profile that the chart ships.

After an intended change, update the files and read the difference:

    python -m core.tests.goldens --update
"""

from __future__ import annotations

import sys
from pathlib import Path

from rljob.api.load import load
from rljob.api.models import RLJob
from rljob.api.yaml_loader import read_yaml
from rljob.manifests import render
from rljob.manifests.inputs import COMPONENTS, Cluster, RenderTarget, read_cluster
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


def texts() -> dict[str, str]:
    """Return file name → expected content."""
    job = load(JOB)
    texts = {
        f"{name}-{role.name}.yaml": to_yaml(role.objects)
        for name, context in CONTEXTS.items()
        for role in render(job, context)
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
    return texts


def with_profile(profile: str) -> RLJob:
    """Return a small job whose trainer and engines have a profile."""
    accelerator = f"{{profile: {profile}}}"
    fields = [f"spec.trainer.accelerator={accelerator}", f"spec.rollouts=[{{name: main, accelerator: {accelerator}}}]"]
    return load(
        JOB, [*fields, "spec.trainer.processesPerNode=8", "spec.trainer.rdma=null", "spec.trainer.template=null"]
    )


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    for old in (path for start in (*CONTEXTS, "profile") for path in DIRECTORY.glob(f"{start}-*")):
        old.unlink()
    for name, text in texts().items():
        (DIRECTORY / name).write_text(text)
