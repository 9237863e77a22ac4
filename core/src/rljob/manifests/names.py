"""Names of a job's objects: they follow from the job alone, so that whoever makes one twice makes the same one."""

from __future__ import annotations

import hashlib

LABEL_LIMIT = 63
"""Characters of a label's value."""
NAME_LIMIT = 52
"""Characters of an object's name: what StatefulSets and Indexed Jobs append for their pods must fit into a label."""
_HASH_BYTES = 4


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
