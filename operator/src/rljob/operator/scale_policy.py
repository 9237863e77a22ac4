"""What the built-in autoscaler decides by: loads over time, and the policy of a role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadPoint:
    """The load of a role at one moment. ``at``: Unix seconds."""

    at: float
    load: float


@dataclass(frozen=True)
class ScalePolicy:
    """How a role is scaled.

    ``target``: load per replica. ``out_seconds``, ``in_seconds``: a load must last so long to add or remove replicas.
    ``idle_only``: replicas are removed only while there is no load.
    """

    target: float
    minimum: int
    maximum: int
    out_seconds: float
    in_seconds: float
    idle_only: bool = False

    @property
    def period(self) -> float:
        """Seconds between two samples of the load."""
        return min(10.0, max(1.0, min(self.out_seconds, self.in_seconds) / 3))

    def clamp(self, replicas: int) -> int:
        """Return replicas within the bounds."""
        return max(self.minimum, min(replicas, self.maximum))


@dataclass(frozen=True)
class SampledRole:
    """A role whose load is sampled. ``replicas``: the present ones, within the bounds of the policy."""

    policy: ScalePolicy
    replicas: int
