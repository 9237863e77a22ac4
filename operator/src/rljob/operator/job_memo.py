"""State that the executor keeps of a job between reconciles. It can be rebuilt: losing it only costs requests.

Times are seconds of the executor's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rljob.manifests.inputs import Object
from rljob.operator import drift
from rljob.operator.api_types import Child
from rljob.operator.plan import Ref

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
MIN_RETRY_SECONDS = 0.5
"""Lower bound of the delay between two reconciles that only retry failed children."""


@dataclass
class ChildError:
    """A child that could not be created, changed or deleted."""

    message: str
    foreign: bool
    """Another owner's object has the name; otherwise the API server refuses the request."""
    retry_at: float
    tries: int


@dataclass
class JobMemo:
    """State of one job."""

    generation: int = 0
    child_errors: dict[Ref, ChildError] = field(default_factory=dict)
    settled: dict[Ref, tuple[Any, ...]] = field(default_factory=dict)
    """Child → fingerprint of the child and its rendering when they matched."""
    free_names: set[Ref] = field(default_factory=set)
    """Names in Plan.needed that no foreign object had when they were checked."""
    unrepairable: dict[Ref, tuple[str, frozenset[drift.Path]]] = field(default_factory=dict)
    """Child → hash of its rendering, and the fields that differed from the rendering even after an apply."""

    def reported(self) -> set[tuple[Ref, str]]:
        """Return (child, message) for every child that could not be created, changed or deleted."""
        return {(ref, child_error.message) for ref, child_error in self.child_errors.items()}

    def begin_generation(self, generation: int, now: float) -> None:
        """If the spec has changed, retry every failed child at once; an error stays until its child is retried."""
        if self.generation == generation:
            return
        self.generation = generation
        for child_error in self.child_errors.values():
            child_error.retry_at, child_error.tries = now, 0

    def drop_errors(self, refs: Collection[Ref]) -> None:
        """Drop the errors of children that are not in the plan any more."""
        for ref in refs:
            del self.child_errors[ref]

    def backing_off(self, ref: Ref, now: float) -> bool:
        """Return whether it is too early to retry a failed child."""
        child_error = self.child_errors.get(ref)
        return child_error is not None and now < child_error.retry_at

    def note_error(self, ref: Ref, message: str, now: float, *, foreign: bool) -> None:
        """Record a failure; the delay until the retry doubles with every failure."""
        known = self.child_errors.get(ref)
        tries = known.tries + 1 if known is not None else 1
        wait = min(FIRST_RETRY_SECONDS * 2.0 ** min(tries - 1, 10), LAST_RETRY_SECONDS)
        self.child_errors[ref] = ChildError(message, foreign, now + wait, tries)

    def retry_after(self, now: float) -> float | None:
        """Return the seconds until the first retry; None if no child has failed."""
        times = [child_error.retry_at for child_error in self.child_errors.values()]
        return max(MIN_RETRY_SECONDS, min(times) - now) if times else None


def fingerprint(rendered: Object, live: Child) -> tuple[Any, ...]:
    """Return the values that determine whether a child matches its rendering.

    For objects with a generation these include the generation and the metadata instead of the resourceVersion, which
    changes whenever a controller writes their status.
    """
    meta = live.metadata
    observed: tuple[Any, ...] = (meta.uid, meta.resource_version)
    if meta.generation:
        observed = (meta.uid, meta.generation, meta.labels, meta.annotations, meta.owner_references)
    # A plan changes replicas and disruption budgets of a rendering without changing its hash.
    numbers = (drift.replicas_of(rendered), rendered.get("spec", {}).get("maxUnavailable"))
    desired = (drift.role_hash_of(rendered), drift.rendered_hash_of(rendered), *numbers, rendered.get("status"))
    return (meta.deletion_timestamp, *observed, *desired)
