"""Fields and numbers of processes with which a trainer that does not fit its GPUs would fit. Pure.

Called by :mod:`rljob.api.memory_checks` for the remedy of a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from rljob.api.memory_plan import TrainerSettings, fewest_ranks, plan_memory, shared_host_bytes
from rljob.api.model_shape import ModelShape

SMALLER: dict[str, dict[str, Any]] = {
    "spec.trainer.recompute: layer": {"recompute": "layer"},
    "spec.trainer.optimizer.offload: true": {"offload": True},
}
"""Fields with which a step needs less memory of the device → the change of the plan's settings."""


def fields_that_help(model: ModelShape, settings: TrainerSettings, device_bytes: int, host_bytes: int = 0) -> str:
    """Return the fewest fields, with values, with which the same ranks and tokens fit a device; empty if none do.

    Args:
        model: the policy.
        settings: which do not fit.
        device_bytes: memory of one GPU.
        host_bytes: memory of the machine with all ranks; 0: not known.
    """
    for number in range(1, len(SMALLER) + 1):
        for fields, changed in _changes(model, settings, number, host_bytes):
            if plan_memory(model, changed).device <= device_bytes:
                return fields
    return ""


def ranks_that_help(
    model: ModelShape, settings: TrainerSettings, device_bytes: int, host_bytes: int = 0
) -> tuple[str, int] | None:
    """Return the fewest fields, with values, that fit a device with more ranks, and the fewest ranks with these fields;
    None if none do. Arguments as in :func:`fields_that_help`."""
    for number in range(1, len(SMALLER) + 1):
        found = [
            (ranks, fields)
            for fields, changed in _changes(model, settings, number, host_bytes)
            if (ranks := fewest_ranks(model, changed, device_bytes)) is not None
        ]
        if found:
            ranks, fields = min(found, key=lambda entry: entry[0])
            return fields, ranks
    return None


def _changes(
    model: ModelShape, settings: TrainerSettings, number: int, host_bytes: int
) -> Iterator[tuple[str, TrainerSettings]]:
    """Yield each change of ``number`` fields that are not set yet, if the memory of the host is enough for it."""
    unset = [field for field, change in SMALLER.items() if replace(settings, **change) != settings]
    for fields in combinations(unset, number):
        changed = replace(settings, **{name: value for field in fields for name, value in SMALLER[field].items()})
        if not host_bytes or not changed.offload or shared_host_bytes(model, changed) <= host_bytes:
            yield " and ".join(fields), changed
