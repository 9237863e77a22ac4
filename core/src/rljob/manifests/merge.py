"""Merges a role's pod template over the pod that rljob renders: Kubernetes' strategic merge, by the API's merge keys.

Maps are merged. Lists of :data:`KEYS` are merged entry by entry, and new entries are appended. Other values (scalars,
command, args, tolerations) are replaced. Null deletes a value; an entry with only its key left is deleted.
If fields exclude each other (value and valueFrom of a variable, the source of a volume, the handler of a probe), the
template's field wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
}
"""List → the fields that identify an entry."""
_DEFAULTS = {"protocol": "TCP"}
_HANDLERS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
_VALUES = frozenset({"value", "valueFrom"})


def merge(base: dict[str, Any], template: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``base`` with ``template`` merged over it. Both stay unchanged; the result shares values with them."""
    return _maps(base, template or {}, "")


def _maps(base: Mapping[str, Any], over: Mapping[str, Any], field: str) -> dict[str, Any]:
    merged = {key: value for key, value in base.items() if not _excluded(key, over, field)}
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = _maps(merged.get(key) or {}, value, key)
        elif isinstance(value, list) and key in KEYS:
            merged[key] = _lists(merged.get(key) or [], value, key)
        else:
            merged[key] = _without_nulls(value)
    return merged


def _lists(base: list[dict[str, Any]], over: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    keys = KEYS[field]
    merged = {_identity(entry, keys): entry for entry in base}
    for entry in over:
        identity = _identity(entry, keys)
        before = merged.get(identity, {})
        after = _maps(before, entry, field)
        if before and None in entry.values() and after.keys() <= set(keys):
            del merged[identity]
        else:
            merged[identity] = after
    return list(merged.values())


def _identity(entry: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(entry.get(key) or _DEFAULTS.get(key) for key in keys)


def _excluded(key: str, over: Mapping[str, Any], field: str) -> bool:
    """Return whether the template sets a field that excludes the base's ``key``."""
    if key in over:
        return False
    given = {name for name, value in over.items() if value is not None}
    if field == "env":
        return key in _VALUES and bool(given & _VALUES)
    if field == "volumes":
        return key != "name" and bool(given - {"name"})
    return key in _HANDLERS and bool(given & _HANDLERS)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
