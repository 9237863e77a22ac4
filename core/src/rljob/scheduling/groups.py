"""Groups and samples as the scheduler sees them, and how they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

End = Literal["trained", "filtered", "surplus", "expired", "failed", "evaluated"]
"""How a sample ends: exactly one of these. ``evaluated`` is for samples of evaluations only."""

REJECTED: tuple[End, ...] = ("filtered", "surplus", "expired", "failed")
"""Ends of what was started and not trained."""


@dataclass(eq=False)
class Sample:
    """One (prompt, member). ``min_version`` is the lowest policy version of any token it has or, while an engine works
    on it, of the engine it was sent to; None as long as neither is so."""

    id: str
    group: Group
    member: int
    min_version: int | None = None
    reward: float | None = None
    end: End | None = None

    @property
    def open(self) -> bool:
        """Whether it is still being made."""
        return self.reward is None and self.end is None


@dataclass(eq=False)
class Group:
    """The samples of one prompt. ``seq`` is the order of admission; ``complete`` once it is fit for a batch."""

    id: str
    seq: int
    task: str
    row: int
    samples: list[Sample] = field(default_factory=list)
    complete: bool = False
    step: int | None = None

    @property
    def min_version(self) -> int | None:
        """Lowest policy version in it; None when no engine has begun."""
        versions = [s.min_version for s in self.samples if s.min_version is not None and s.end is None]
        return min(versions) if versions else None

    def deadline(self, max_staleness: int) -> int | None:
        """Step of the last batch it may join; None when no engine has begun."""
        lowest = self.min_version
        return None if lowest is None else lowest + max_staleness


@dataclass(frozen=True)
class Ended:
    """A sample came to its end."""

    sample: Sample
    end: End
    reason: str


def make_group(group_id: str, seq: int, task: str, row: int, members: int) -> Group:
    """Return a group with ``members`` open samples named GROUP.MEMBER."""
    group = Group(group_id, seq, task, row)
    group.samples = [Sample(f"{group_id}.{member}", group, member) for member in range(members)]
    return group
