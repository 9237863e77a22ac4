"""Whether an object is as it was rendered. Pure.

Compared is what we render and nothing else: the API server fills in defaults, controllers and people add fields, and
none of that is ours to judge. What is empty is as good as absent, and quantities are compared by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rljob.manifests.inputs import Object
from rljob.operator.seen import HASH_ANNOTATION, RENDERED_HASH_ANNOTATION, Child

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
"""Lists that are maps by these fields: entries of others beside ours do not matter. All other lists are values."""

_WHOLE = frozenset({"selector", "matchLabels"})
"""Maps that are values: a key more is another meaning."""
_TRUE_BY_DEFAULT = frozenset({"automountServiceAccountToken", "allowPrivilegeEscalation", "enableServiceLinks"})
"""Fields that are not false when they are absent."""
_CHOICES = frozenset({"emptyDir"})
"""Members of a union that say something though they are empty."""
_QUANTITIES = frozenset({"limits", "requests", "capacity", "hard"})
"""Maps of quantities."""
_QUANTITY_FIELDS = frozenset({"sizeLimit", "divisor"})
_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(1000),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("MGTPE", 2)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
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


def role_of(rendered: Object) -> str:
    """Return the hash of the inputs that an object is rendered for."""
    return _annotation(rendered, HASH_ANNOTATION)


def rendered_hash_of(rendered: Object) -> str:
    """Return the hash of an object as it is rendered."""
    return _annotation(rendered, RENDERED_HASH_ANNOTATION)


def same_role(rendered: Object, child: Child) -> bool:
    """Return whether the object was rendered for the same inputs of its role."""
    return role_of(rendered) == child.metadata.annotations.get(HASH_ANNOTATION, "")


def same_rendering(rendered: Object, child: Child) -> bool:
    """Return whether the object was rendered to the same, replicas aside, as it would be now.

    Every version of the operator says what it rendered: where nothing is said, somebody took it away.
    """
    return child.metadata.annotations.get(RENDERED_HASH_ANNOTATION) in (None, rendered_hash_of(rendered))


def departures(rendered: Object, live: Object) -> frozenset[Path]:
    """Return the fields in which an object departs from how it was rendered; spec.replicas and status do not count."""
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


def departs(wanted: Any, there: Any) -> bool:
    """Return whether a part of an object departs from how it was rendered."""
    return next(_compare(wanted, there, ()), None) is not None


def replicas_of(body: Mapping[str, Any]) -> int | None:
    """Return spec.replicas, if the object has it."""
    spec = body.get("spec")
    return spec.get("replicas") if isinstance(spec, dict) else None


def _annotation(rendered: Object, name: str) -> str:
    return str(rendered["metadata"].get("annotations", {}).get(name, ""))


def _compare(wanted: Any, there: Any, path: Path) -> Iterator[Path]:
    """Yield the paths in which ``there`` is not as ``wanted``."""
    if wanted == there:
        return  # most of an object is, and is compared in C
    if wanted is None or wanted == "":
        return  # says nothing: the API server may have filled in its default
    if isinstance(wanted, dict) and wanted:
        if there is not None and not isinstance(there, dict):
            yield path
            return
        if path and path[-1] in _WHOLE and there and not there.keys() <= wanted.keys():
            yield path
        for key, value in wanted.items():
            yield from _compare(value, (there or {}).get(key), (*path, key))
    elif _is_empty(wanted):
        if not _is_empty(there) or (there is None and _is_told(wanted, path)):
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


def _is_told(wanted: Any, path: Path) -> bool:
    """Return whether something empty means another thing than nothing at all."""
    if wanted is False:
        return bool(path) and path[-1] in _TRUE_BY_DEFAULT
    return isinstance(wanted, dict) and bool(path) and path[-1] in _CHOICES


def _is_empty(value: Any) -> bool:
    """Return whether the API server would leave ``value`` out, or stores it as good as nothing."""
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
    text = str(value)
    digits = text.rstrip("numkKMGTPEi")
    try:
        return Decimal(digits) * _SUFFIXES[text[len(digits) :]]
    except (InvalidOperation, KeyError):
        return None
