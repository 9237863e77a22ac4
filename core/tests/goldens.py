"""The golden files: the rendered objects of every role, in a cluster with GPUs and in a cluster without GPUs.

After an intended change, update the files and read the difference:

    python -m core.tests.goldens --update
"""

from __future__ import annotations

import sys
from pathlib import Path

from rljob.api.load import load
from rljob.manifests import render
from rljob.manifests.inputs import COMPONENTS, Cluster, RenderTarget
from rljob.manifests.render import to_yaml

DIRECTORY = Path(__file__).parent / "golden"
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
    return {
        f"{name}-{role.name}.yaml": to_yaml(role.objects)
        for name, context in CONTEXTS.items()
        for role in render(job, context)
    }


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    for old in (*DIRECTORY.glob("gpu-*"), *DIRECTORY.glob("cpu-*")):
        old.unlink()
    for name, text in texts().items():
        (DIRECTORY / name).write_text(text)
