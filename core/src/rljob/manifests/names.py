"""Names, labels and annotations of a job's objects and pods. They follow from the job alone, so that creating an object
twice creates the same one.
"""

from __future__ import annotations

import hashlib

LABEL_LIMIT = 63
"""Characters of a label's value."""
NAME_LIMIT = 52
"""Characters of an object's name: what StatefulSets and Indexed Jobs append for their pods must fit into a label."""
_HASH_BYTES = 4
JOB = "rljob.dev/job"
ROLE = "rljob.dev/role"
ATTEMPT = "rljob.dev/attempt"
"""Of the trainer's pods."""
TIER = "rljob.dev/tier"
"""Of the pods of trainer and pools: ``gang`` or ``elastic``. The two Deployments of a pool select by it besides, as
two that select the same pods would adopt each other's."""
ROLE_HASH = "rljob.dev/role-hash"
"""Annotation: hash of the manifest's fields that the role's pods depend on."""
RENDERED_HASH = "rljob.dev/rendered-hash"
"""Annotation: hash of the object as it was rendered."""
SPEC_HASH = "rljob.dev/spec-hash"
"""Annotation of a claim: hash of the fields that cannot change in a job's life. A retained claim is taken over by a
later job of the same name only if they are equal."""


def bounded(name: str, limit: int = NAME_LIMIT) -> str:
    """Return ``name``; a longer one is cut and ends with a hash of all of it, so that two do not become one."""
    if len(name) <= limit:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=_HASH_BYTES).hexdigest()
    return f"{name[: limit - 2 * _HASH_BYTES - 1].rstrip('-')}-{digest}"


def role_name(kind: str, entry: str = "") -> str:
    """Return the name of a role, which is a label too: ``trainer``, ``rollout-POOL``, ``reward-NAME``."""
    return bounded(f"{kind}-{entry}", LABEL_LIMIT) if entry else kind


def object_name(job: str, *rest: str) -> str:
    """Return the name of an object of ``job``: ``JOB-ROLE``, ``JOB-trainer-ATTEMPT``, ``JOB-rollout-POOL-elastic``."""
    return bounded("-".join((job, *rest)))


def secret_name(job: str, uid: str) -> str:
    """Return the name of the Secret that holds a job's tokens; another job of the same name has another one."""
    return object_name(job, "tokens", *([uid[:8]] if uid else []))


def claim_name(job: str, given: str | None = None) -> str:
    """Return the name of the claim that holds a job's storage: the one ``given`` in its manifest, or its own."""
    return given or object_name(job, "storage")


def dns_name(host: str, namespace: str, domain: str) -> str:
    """Return the name under which the whole cluster finds a service, or a pod of a headless one."""
    return f"{host}.{namespace}.svc.{domain}"


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
