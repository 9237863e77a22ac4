"""The initializer: a Job in the trainer's image, done before any pod with an accelerator is made."""

from __future__ import annotations

from typing import Any

from rljob.api.pods import MAIN, main_container
from rljob.manifests.context import Role
from rljob.manifests.pods import Pod, pod_template
from rljob.manifests.scene import Scene
from rljob.manifests.trainer import configuration_error
from rljob.protocol.environment import SEED

RETRIES = 3
OF_THE_TRAINERS_MAIN = ("image", "imagePullPolicy", "env", "envFrom")


def initializer(scene: Scene) -> Role | None:
    """Return the initializer's role, if the job has one."""
    spec = scene.job.spec
    if spec.initializer is None:
        return None
    inherited, own = _of_the_trainers(spec.trainer.template), spec.initializer.template
    # The trainer's alone where there is no other: so it was before there was one, and running jobs stay.
    role = scene.identity("initializer", own=inherited if own is None else [inherited, own])
    pod = Pod(
        role,
        image="trainer",
        command=["python", "-m", "rljob.trainer.initialize", "--", *spec.initializer.command],
        variables={SEED: str(spec.seed)},
        more={"restartPolicy": "Never"},
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
            "template": pod_template(scene, pod),
        }
    }
    job = scene.object(role, "Job", scene.name("initializer"), body, api="batch/v1")
    return Role(role.name, role.kind, role.hash, (job,), desired=1)


def _of_the_trainers(template: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the initializer takes of the trainer's template: the image and how it is had, and variables."""
    main = {key: value for key, value in main_container(template).items() if key in OF_THE_TRAINERS_MAIN}
    spec: dict[str, Any] = {"containers": [{"name": MAIN, **main}]}
    secrets = ((template or {}).get("spec") or {}).get("imagePullSecrets")
    return {"spec": spec | ({"imagePullSecrets": secrets} if secrets else {})}
