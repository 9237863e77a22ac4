"""Labels and annotations of a job's objects and pods."""

from __future__ import annotations

JOB = "rljob.dev/job"
ROLE = "rljob.dev/role"
ATTEMPT = "rljob.dev/attempt"
"""Of the trainer's pods."""
TIER = "rljob.dev/tier"
"""Of the pods of trainer and pools: ``gang`` or ``elastic``. The two Deployments of a pool select by it besides, as
two that select the same pods would adopt each other's."""
ROLE_HASH = "rljob.dev/role-hash"
"""Annotation: hash of the manifest's fields that the role's pods depend on."""
INTENT = "rljob.dev/intent"
"""Annotation: hash of the object as it was rendered."""
SPEC_HASH = "rljob.dev/spec-hash"
"""Annotation of a claim: hash of the fields that cannot change in a job's life. A retained claim is taken over by a
later job of the same name only if they are equal."""


def labels(job: str, kind: str, role: str) -> dict[str, str]:
    """Return the labels of every object and pod of a role."""
    return {
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": kind,
        "app.kubernetes.io/part-of": "rljob",
        "app.kubernetes.io/managed-by": "rljob-operator",
        JOB: job,
        ROLE: role,
    }


def selector(job: str, role: str = "") -> dict[str, str]:
    """Return the labels that the pods of a role have, or those of all roles."""
    return {JOB: job, ROLE: role} if role else {JOB: job}


def selector_text(job: str, role: str) -> str:
    """Return :func:`selector` as text, for the ``scale`` subresource."""
    return ",".join(f"{key}={value}" for key, value in selector(job, role).items())
