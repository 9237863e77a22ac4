"""What the pods of each role demand of a cluster, as the user wrote it: resources, and properties of nodes.

Kueue reserves quota for it and assigns flavors by it. The other fields of a manifest and of a template (image,
variables, settings of the run) change nothing that Kueue has counted. All of it comes from the manifest: neither a new
release of the operator nor another setting of the cluster changes it.

Source: Kueue's requests of a PodSet (pkg/resources) and the flavors that fit its pods (pkg/scheduler/flavorassigner).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob.api.models import RLJob, RLJobSpec
from rljob.manifests.names import role_name

_OF_ROLE = ("accelerator", "hosts", "parallelism", "processesPerNode", "rdma")
_OF_POD = ("nodeSelector", "overhead", "resourceClaims", "resources", "runtimeClassName", "tolerations")
_OF_CONTAINER = ("resources", "restartPolicy")
"""restartPolicy makes an init container a sidecar, whose requests are added to those of the containers."""


def demands(job: RLJob) -> dict[str, Any]:
    """Return role → the fields of its section that its pods' requests and nodes follow from. Roles without any may be
    missing. The number of pods is not among them."""
    written = RLJobSpec.model_dump(job.spec, mode="json", by_alias=True, exclude_defaults=True)
    sections = {name: written.get(name) or {} for name in ("initializer", "coordinator", "runner", "trainer")}
    for kind, field in (("reward", "rewards"), ("environment", "environments"), ("rollout", "rollouts")):
        sections |= {role_name(kind, entry["name"]): entry for entry in written.get(field) or ()}
    return {role: _of_section(section) for role, section in sections.items()}


def _of_section(section: Mapping[str, Any]) -> dict[str, Any]:
    return _picked(section, _OF_ROLE) | _of_template((section.get("template") or {}).get("spec") or {})


def _of_template(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a PodSpec of the user demands. Containers that demand nothing are left out."""
    found = _picked(spec, _OF_POD) | _picked(spec.get("affinity") or {}, ("nodeAffinity",))
    for field in ("containers", "initContainers"):
        own = {each["name"]: _picked(each, _OF_CONTAINER) for each in spec.get(field) or () if each.get("resources")}
        found |= {field: own} if own else {}
    return found


def _picked(value: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value[key] for key in keys if key in value}
