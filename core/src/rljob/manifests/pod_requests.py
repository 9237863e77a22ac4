"""The resources that a pod requests, as schedulers count them.

Source: Kubernetes' documentation of resource requests, init containers and sidecar containers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

SUFFIXES: Mapping[str, Decimal] = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(1000),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("MGTPE", 2)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
"""Suffix of a quantity of Kubernetes → factor."""

Amounts = dict[str, Decimal]
"""Resource → amount in its base unit: cores, bytes, devices."""


def amount(quantity: Any) -> Decimal:
    """Return the value of a quantity: 1, "500m", "1.5Gi", "1e3".

    Raises:
        decimal.InvalidOperation, KeyError: it is not a quantity.
    """
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    return Decimal(digits) * SUFFIXES[text[len(digits) :]]


def total_requests(templates: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, str]:
    """Return resource → quantity that pods request together. ``templates``: pod template and number of pods."""
    total: Amounts = {}
    for template, count in templates:
        _add(total, _of_pod(template["spec"]), count)
    return {resource: f"{value.normalize():f}" for resource, value in sorted(total.items())}


def _of_pod(spec: Mapping[str, Any]) -> Amounts:
    """Return the requests of a pod: of its containers and sidecars together, or of an init container if it needs more,
    which runs beside the sidecars before it; plus the overhead."""
    running: Amounts = {}
    highest: Amounts = {}
    for container in spec.get("initContainers") or ():
        own = _of_container(container)
        if container.get("restartPolicy") == "Always":
            _add(running, own)
            own = {}
        beside = dict(running)
        _add(beside, own)
        highest = _maximum(highest, beside)
    for container in spec.get("containers") or ():
        _add(running, _of_container(container))
    found = _maximum(highest, running)
    _add(found, {resource: amount(value) for resource, value in (spec.get("overhead") or {}).items()})
    return found


def _of_container(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    stated = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: amount(value) for resource, value in stated.items()}


def _add(total: Amounts, more: Amounts, times: int = 1) -> None:
    for resource, value in more.items():
        total[resource] = total.get(resource, Decimal(0)) + value * times


def _maximum(one: Amounts, other: Amounts) -> Amounts:
    return {key: max(one.get(key, Decimal(0)), other.get(key, Decimal(0))) for key in {**one, **other}}
