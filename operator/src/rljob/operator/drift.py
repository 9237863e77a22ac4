"""Compares objects with their renderings. Pure.

Only rendered fields are compared: the API server sets defaults, and controllers and users add fields. An empty value
equals an absent one, and quantities are compared by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rljob.manifests.inputs import Object
from rljob.manifests.names import RENDERED_HASH, ROLE_HASH
from rljob.manifests.pod_requests import amount
from rljob.operator.api_types import Child

Path = tuple[str | int, ...]

_MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists that are maps with these keys: additional entries are ignored. All other lists are compared as a whole."""

_WHOLE = frozenset({"selector", "matchLabels"})
"""Maps that are compared as a whole: an additional key changes the meaning."""
_TRUE_BY_DEFAULT = frozenset({"automountServiceAccountToken", "allowPrivilegeEscalation", "enableServiceLinks"})
"""Fields whose default is true."""
_CHOICES = frozenset({"emptyDir"})
"""Members of a union that have a meaning even if they are empty."""
_QUANTITIES = frozenset({"limits", "requests", "capacity", "hard"})
"""Maps of quantities."""
_QUANTITY_FIELDS = frozenset({"sizeLimit", "divisor"})
_ROOT_FIELDS = (
    "spec",
    "data",
    "binaryData",
    "immutable",
    "rules",
    "roleRef",
    "subjects",
    "automountServiceAccountToken",
)
_METADATA = ("labels", "annotations", "ownerReferences")


def role_hash_of(rendered: Object) -> str:
    """Return the hash of the inputs of the object's role."""
    return _annotation(rendered, ROLE_HASH)


def rendered_hash_of(rendered: Object) -> str:
    """Return the hash of a rendered object."""
    return _annotation(rendered, RENDERED_HASH)


def same_role(rendered: Object, child: Child) -> bool:
    """Return whether the live object was rendered from the same inputs of its role."""
    return role_hash_of(rendered) == child.metadata.annotations.get(ROLE_HASH, "")


def same_rendering(rendered: Object, child: Child) -> bool:
    """Return whether the live object had the same rendering (replicas not compared).

    Every version of the operator sets the annotation: if it is missing, another client has removed it.
    """
    return child.metadata.annotations.get(RENDERED_HASH) in (None, rendered_hash_of(rendered))


def differing_fields(rendered: Object, live: Object) -> frozenset[Path]:
    """Return the fields in which an object differs from its rendering, except spec.replicas and status."""
    found: set[Path] = set()
    for field in _ROOT_FIELDS:
        if field in rendered:
            found.update(_compare(rendered[field], live.get(field), (field,)))
    for field in _METADATA:
        if field in rendered["metadata"]:
            wanted, there = rendered["metadata"][field], live["metadata"].get(field)
            found.update(_compare(wanted, there, ("metadata", field)))
    found.discard(("spec", "replicas"))
    return frozenset(found)


def differs(wanted: Any, there: Any) -> bool:
    """Return whether a part of an object differs from its rendering."""
    return next(_compare(wanted, there, ()), None) is not None


def replicas_of(body: Mapping[str, Any]) -> int | None:
    """Return spec.replicas; None if the object has none."""
    spec = body.get("spec")
    return spec.get("replicas") if isinstance(spec, dict) else None


def _annotation(rendered: Object, name: str) -> str:
    return str(rendered["metadata"].get("annotations", {}).get(name, ""))


def _compare(wanted: Any, there: Any, path: Path) -> Iterator[Path]:
    """Yield the paths in which ``there`` differs from ``wanted``."""
    if wanted == there:
        return  # the usual case, compared in C
    if wanted is None or wanted == "":
        return  # unset: the API server may have set its default
    if isinstance(wanted, dict) and wanted:
        if there is not None and not isinstance(there, dict):
            yield path
            return
        if path and path[-1] in _WHOLE and there and not there.keys() <= wanted.keys():
            yield path
        for key, value in wanted.items():
            yield from _compare(value, (there or {}).get(key), (*path, key))
    elif _is_empty(wanted):
        if not _is_empty(there) or (there is None and _is_significant(wanted, path)):
            yield path
    elif isinstance(wanted, list | tuple):
        yield from _compare_lists(wanted, there, path)
    elif not _same_quantity(wanted, there, path):
        yield path


def _compare_lists(wanted: Sequence[Any], there: Any, path: Path) -> Iterator[Path]:
    if not isinstance(there, list):
        yield path
        return
    keys = _MERGE_KEYS.get(str(path[-1])) if path else None
    if keys is None or not all(isinstance(entry, dict) for entry in [*wanted, *there]):
        if len(wanted) != len(there):
            yield path
            return
        for i, (entry, other) in enumerate(zip(wanted, there, strict=True)):
            yield from _compare(entry, other, (*path, i))
        return
    by_key = {tuple(entry.get(key) for key in keys): entry for entry in there}
    for entry in wanted:
        name = tuple(entry.get(key) for key in keys)
        yield from _compare(entry, by_key.get(name), (*path, "/".join(map(str, name))))


def _is_significant(wanted: Any, path: Path) -> bool:
    """Return whether an empty value differs in meaning from an absent one."""
    if wanted is False:
        return bool(path) and path[-1] in _TRUE_BY_DEFAULT
    return isinstance(wanted, dict) and bool(path) and path[-1] in _CHOICES


def _is_empty(value: Any) -> bool:
    """Return whether the API server drops ``value`` or treats it as unset."""
    if isinstance(value, dict):
        return all(_is_empty(inner) for inner in value.values())
    return value is None or value is False or value == 0 or value == "" or value == []


def _same_quantity(wanted: Any, there: Any, path: Path) -> bool:
    if not (path and path[-1] in _QUANTITY_FIELDS) and not (len(path) > 1 and path[-2] in _QUANTITIES):
        return False
    one, other = _quantity(wanted), _quantity(there)
    return one is not None and one == other


def _quantity(value: Any) -> Decimal | None:
    """Return the value of a Kubernetes quantity: 1, "500m", "1.5Gi", "1e3"."""
    try:
        return amount(value)
    except (InvalidOperation, KeyError):
        return None
