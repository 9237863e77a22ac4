"""The scheduler's groups and samples, and the ends of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rljob.scheduling.request import SharedPrefix

End = Literal["trained", "baseline", "filtered", "surplus", "expired", "failed", "evaluated"]
"""The end of a sample; every sample has exactly one. Only samples of evaluations end as ``evaluated``. The greedy
answer of a group that joins a batch ends as ``baseline``: its reward is the baseline of the others, and it is not
trained."""

REJECTED: tuple[End, ...] = ("filtered", "surplus", "expired", "failed")
"""Ends of samples that were started and not trained."""
Cause = Literal[
    "", "equal_rewards", "mean_below", "mean_above", "enough_members", "not_needed", "run_ended", "too_old",
    "not_complete", "generation", "runner", "protocol", "group_failed", "function", "filter_failed",
]  # fmt: skip
"""Why a sample ended, from a fixed set, for counters; empty for a trained one and a baseline."""
CAUSES: dict[End, tuple[Cause, ...]] = {
    "filtered": ("equal_rewards", "mean_below", "mean_above", "function"),
    "surplus": ("enough_members", "not_needed", "run_ended"),
    "expired": ("too_old", "not_complete"),
    "failed": ("generation", "runner", "protocol", "group_failed", "filter_failed"),
}
"""End → its causes. failed: no engine could generate it; its runner reported a failure, of its loop, reward or
environment; its loop made other calls than before; another sample of its
group failed; the user-written filter of its group could not decide."""


class Sample(msgspec.Struct, eq=False, weakref=True):
    """One member of a group. ``min_version`` is the lowest policy version among its tokens and, during generation, the
    version of its engine; None without tokens and without an engine."""

    id: str
    group: Group
    member: int
    min_version: int | None = None
    reward: float | None = None
    end: End | None = None

    @property
    def open(self) -> bool:
        """Whether the sample is not scored and has not ended."""
        return self.reward is None and self.end is None

    @property
    def greedy(self) -> bool:
        """Whether it is the greedy answer of its group."""
        return self.group.greedy and self.member == 0


@dataclass(eq=False)
class Group:
    """The samples of one prompt. ``seq``: order of admission. ``sufficient``: enough members are scored to train the
    group. ``complete``: its survivors are drawn and accepted, and all other members ended. ``restarts``: how many
    groups of the same prompt ended before it. ``dispatched``: version of the engine that got its first request.
    ``greedy``: its first member is a greedy answer, whose reward is the baseline of the others."""

    id: str
    seq: int
    task: str
    row: int
    samples: list[Sample] = field(default_factory=list)
    sufficient: bool = False
    complete: bool = False
    step: int | None = None
    restarts: int = 0
    dispatched: int | None = None
    greedy: bool = False
    prefix: SharedPrefix = field(default_factory=SharedPrefix)

    @property
    def scored(self) -> list[Sample]:
        """Its samples with a reward that have not ended, without the greedy answer."""
        return [s for s in self.samples if s.reward is not None and s.end is None and not s.greedy]

    def count_scored(self) -> int:
        """Return how many of its samples have a reward, also those that have ended, without the greedy answer."""
        return sum(s.reward is not None and not s.greedy for s in self.samples)

    @property
    def baseline(self) -> Sample | None:
        """Its greedy answer, if it has one that has not ended."""
        return self.samples[0] if self.greedy and self.samples and self.samples[0].end is None else None

    @property
    def min_version(self) -> int | None:
        """Lowest policy version of its samples that have not ended; None if none of them has one."""
        lowest = None
        for sample in self.samples:
            version = sample.min_version
            if version is not None and sample.end is None and (lowest is None or version < lowest):
                lowest = version
        return lowest

    def deadline(self, max_staleness: int) -> int | None:
        """Step of the last batch that the group may join; None without a version."""
        lowest = self.min_version
        return None if lowest is None else lowest + max_staleness


class Ended(msgspec.Struct, frozen=True):
    """A sample that ended, with the reason."""

    sample: Sample
    end: End
    reason: str
    cause: Cause


def make_group(
    group_id: str, seq: int, task: str, row: int, members: int, restarts: int = 0, greedy: bool = False
) -> Group:
    """Return a group with ``members`` open samples named GROUP.MEMBER; ``greedy``: the first one is a greedy answer."""
    group = Group(group_id, seq, task, row, restarts=restarts, greedy=greedy)
    group.samples = [Sample(f"{group_id}.{member}", group, member) for member in range(members)]
    return group
