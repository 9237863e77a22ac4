"""Names, labels and annotations of a job's objects and pods. They depend on the job alone, so that creating an object
twice gives the same object.
"""

from __future__ import annotations

import hashlib

LABEL_LIMIT = 63
"""Maximum length of a label value."""
NAME_LIMIT = 52
"""Maximum length of an object name: the suffixes that StatefulSets and Indexed Jobs append must fit into a label."""
_HASH_BYTES = 4
JOB = "rljob.dev/job"
ROLE = "rljob.dev/role"
ATTEMPT = "rljob.dev/attempt"
"""Label of the trainer's pods."""
RAY_CLUSTER = "RayCluster"
"""Kind of the object of an engine that spans hosts."""
TIER = "rljob.dev/tier"
"""Label of the pods of trainer and pools: ``gang`` or ``elastic``. The two Deployments of a pool select by it, because
Deployments with the same selector adopt each other's pods."""
ROLE_HASH = "rljob.dev/role-hash"
"""Annotation: hash of the manifest fields that the role's pods depend on."""
RENDERED_HASH = "rljob.dev/rendered-hash"
"""Annotation: hash of the rendered object."""
DEMAND_HASH = "rljob.dev/demand-hash"
"""Annotation of a Workload of Kueue: hash of its queue, and of the numbers and demands of its pods as the user wrote
them. An admission holds only while it is the same."""
RESTARTS = "rljob.dev/restarts"
"""Annotation of a RayCluster: failures of the engines that it replaces, minus those that time has offset."""
SPEC_HASH = "rljob.dev/spec-hash"
"""Annotation of a claim: hash of the immutable fields. A later job of the same name reuses a retained claim only if the
hashes are equal."""


def bounded(name: str, limit: int = NAME_LIMIT) -> str:
    """Return ``name``. A longer name is cut and ends with a hash of the whole name, so that names are unique."""
    if len(name) <= limit:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=_HASH_BYTES).hexdigest()
    return f"{name[: limit - 2 * _HASH_BYTES - 1].rstrip('-')}-{digest}"


def role_name(kind: str, entry: str = "") -> str:
    """Return the name of a role, which is also a label value: ``trainer``, ``rollout-POOL``, ``reward-NAME``,
    ``environment-NAME``."""
    return bounded(f"{kind}-{entry}", LABEL_LIMIT) if entry else kind


def object_name(job: str, *rest: str) -> str:
    """Return the name of an object of ``job``: ``JOB-ROLE``, ``JOB-trainer-ATTEMPT``, ``JOB-rollout-POOL-elastic``."""
    return bounded("-".join((job, *rest)))


def secret_name(job: str, uid: str) -> str:
    """Return the name of the Secret of a job's tokens. Another job of the same name has another Secret."""
    return object_name(job, "tokens", *([uid[:8]] if uid else []))


def claim_name(job: str, given: str | None = None) -> str:
    """Return the name of the claim of a job's storage. ``given``: the claim that the manifest names, if any."""
    return given or object_name(job, "storage")


def gang_name(job: str) -> str:
    """Return the name of the object that describes a job's gang: a PodGroup, or a Workload of Kueue."""
    return object_name(job, "gang")


def ledger_claim_name(job: str) -> str:
    """Return the name of the claim of a job's ledger, if it has one of its own."""
    return object_name(job, "ledger")


def dns_name(host: str, namespace: str, domain: str) -> str:
    """Return the DNS name of a service, or of a pod of a headless service."""
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
    """Return the selector of the pods of a role, or of all roles."""
    return {JOB: job, ROLE: role} if role else {JOB: job}


def selector_text(job: str, role: str) -> str:
    """Return :func:`selector` as text, for the ``scale`` subresource."""
    return ",".join(f"{key}={value}" for key, value in selector(job, role).items())
