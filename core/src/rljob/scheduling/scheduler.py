"""Admission, groups, deadlines and batches: which prompts start, and which groups train when.

Plain state, driven by events, no I/O and no clock. The coordinator calls it and writes down what it decides.

Invariants:
- With trainer version v at most (α+v+1)·N + redundancy groups were started and not rejected since version 0. Batch s
  takes groups whose lowest version is at least s − α, so no consumed sample is older than α.
- At α = 0 the groups of a batch depend on which groups are accepted, not on when: they are the batches of a plain
  synchronous loop, in admission order.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob.scheduling.filters import GroupFilter
from rljob.scheduling.groups import End, Ended, Group, Sample, make_group
from rljob.scheduling.mixture import Mixture


@dataclass(frozen=True)
class Settings:
    """What the manifest says about scheduling (spec.training, spec.scheduling, spec.algorithm.groupFilter)."""

    steps: int
    groups_per_batch: int
    samples_per_group: int
    max_staleness: int
    redundant_groups: int
    redundant_members: int
    regenerate: bool
    accept: GroupFilter


@dataclass(frozen=True)
class FormedBatch:
    """What asking for a batch came to. ``groups`` are for one optimizer step, in admission order; none while it is not
    time. ``ended`` are samples that the asking brought to an end; ``again`` are the (task, row) of groups that expired,
    to be started afresh with :meth:`Scheduler.restart`."""

    groups: list[Group]
    ended: list[Ended]
    again: list[tuple[str, int]]


class Scheduler:
    """Decides for one run. ``version`` is the trainer's: optimizer steps applied."""

    def __init__(self, settings: Settings, mixture: Mixture) -> None:
        self.settings = settings
        self.version = 0
        self.groups: dict[str, Group] = {}  # open or complete, not yet in a batch
        self.batches: dict[int, list[Group]] = {}  # formed, not yet trained
        self.rejections_in_a_row = 0
        self.failures_in_a_row = 0
        self._mixture = mixture
        self._next_seq = 0
        self._started = 0  # not rejected, since version 0
        self._complete = 0  # of ``groups``

    # --- admission ---

    def admissible(self) -> int:
        """Return how many groups may start now."""
        s = self.settings
        batches = min(s.max_staleness + self.version + 1, s.steps)
        if batches == 0:
            return 0  # nothing is trained, so nothing is redundant either
        return max(0, batches * s.groups_per_batch + s.redundant_groups - self._started)

    def admit(self) -> Group:
        """Start the next prompt's group. Call only while :meth:`admissible` is positive."""
        task, row = self._mixture.next()
        return self._start(task, row)

    def _start(self, task: str, row: int) -> Group:
        members = self.settings.samples_per_group + self.settings.redundant_members
        group = make_group(f"g{self._next_seq}", self._next_seq, task, row, members)
        self._next_seq += 1
        self._started += 1
        self.groups[group.id] = group
        return group

    def restore(self, mixture: Mixture, version: int, started: int, next_seq: int, waiting: list[Group]) -> None:
        """Restore a run from its ledger: ``started`` counts groups that were not rejected, ``waiting`` are those in no
        batch. Complete groups among them are recognised by their scored samples."""
        self._mixture, self.version, self._started, self._next_seq = mixture, version, started, next_seq
        self.groups = {group.id: group for group in waiting}
        for group in waiting:
            group.complete = self._scored(group) >= self.settings.samples_per_group
        self._complete = sum(group.complete for group in waiting)

    @property
    def may_generate(self) -> bool:
        """Whether what an engine begins under the current version can still join a batch. At α = 0 nothing can between
        forming a batch and applying it (replacements of redundant groups wait for the next version)."""
        return self.version + self.settings.max_staleness not in self.batches

    # --- samples end ---

    def score(self, sample: Sample, reward: float) -> list[Ended]:
        """Take the reward of a sample; return what ended by it (a filtered group, surplus members)."""
        group = sample.group
        assert group.id in self.groups and sample.open, f"{sample.id} was scored before"
        sample.reward = reward
        if self._scored(group) < self.settings.samples_per_group:
            return []
        kept = [s for s in group.samples if s.reward is not None]
        if not self.settings.accept([s.reward for s in kept if s.reward is not None]):
            self.rejections_in_a_row += 1
            return self._reject(group, "filtered", "the group's rewards are all equal")
        self.rejections_in_a_row = self.failures_in_a_row = 0
        group.complete = True
        self._complete += 1
        return self._end([s for s in group.samples if s.open], "surplus", "the group has enough members")

    def fail(self, sample: Sample, reason: str) -> list[Ended]:
        """Record that a sample cannot be finished. Its group is rejected unless redundant members make up for it."""
        group = sample.group
        ended = self._end([sample], "failed", reason)
        if sum(s.end is None for s in group.samples) >= self.settings.samples_per_group:
            return ended
        self.failures_in_a_row += 1
        return ended + self._reject(group, "failed", f"{sample.id} of its group failed: {reason}"[:500])

    def _reject(self, group: Group, end: End, reason: str) -> list[Ended]:
        """End a whole group; another may start in its place."""
        del self.groups[group.id]
        self._started -= 1
        self._complete -= group.complete
        return self._end([s for s in group.samples if s.end is None], end, reason)

    def _end(self, samples: list[Sample], end: End, reason: str) -> list[Ended]:
        for sample in samples:
            sample.end = end
        return [Ended(sample, end, reason) for sample in samples]

    def _scored(self, group: Group) -> int:
        return sum(s.reward is not None and s.end is None for s in group.samples)

    # --- batches ---

    def form_batch(self) -> FormedBatch:
        """Form the batch of step ``version`` if it is time.

        Complete groups go earliest deadline first. A group that is not complete holds the batch up only if this is the
        last one it may join; then it is waited for, or given up when redundant groups take its place (``surplus``) or
        it shall be regenerated (``expired``).
        """
        s, step = self.settings, self.version
        if step >= s.steps or step in self.batches or self._complete < s.groups_per_batch:
            return FormedBatch([], [], [])  # asked after every event: the common answer must be cheap
        ended: list[Ended] = []
        again: list[tuple[str, int]] = []
        for group in [g for g in self.groups.values() if g.complete and self._urgency(g)[0] < step]:
            # Never in order of events; a group whose age was not known when its last batch was formed.
            ended += self._reject(group, "expired", f"too old for batch {step}")
            again.append((group.task, group.row))
        ready = sorted((g for g in self.groups.values() if g.complete), key=self._urgency)
        late = [g for g in self.groups.values() if not g.complete and self._urgency(g)[0] <= step]
        if len(ready) < s.groups_per_batch or (late and not s.regenerate and len(late) > s.redundant_groups):
            return FormedBatch([], ended, again)
        if late and s.regenerate:
            for group in late:
                ended += self._reject(group, "expired", f"not complete when batch {step} was due")
                again.append((group.task, group.row))
        elif late:
            for group in late:
                ended += self._reject(group, "surplus", f"not needed by batch {step}, the last it could join")
        chosen, rest = ready[: s.groups_per_batch], ready[s.groups_per_batch :]
        for group in rest:
            if self._urgency(group)[0] <= step:
                ended += self._reject(group, "surplus", f"not needed by batch {step}, the last it could join")
        chosen.sort(key=lambda g: g.seq)
        for group in chosen:
            lowest = group.min_version
            assert lowest is not None and step - lowest <= s.max_staleness, f"{group.id} is older than the bound"
            del self.groups[group.id]
            group.step = step
        self._complete -= len(chosen)
        self.batches[step] = chosen
        return FormedBatch(chosen, ended, again)

    def restart(self, task: str, row: int) -> Group:
        """Start an expired prompt afresh."""
        return self._start(task, row)

    def trained(self, step: int) -> list[Ended]:
        """Batch ``step`` was applied: the version is step + 1."""
        assert step == self.version, f"batch {step} applied at version {self.version}"
        self.version = step + 1
        groups = self.batches.pop(step)
        return self._end([s for g in groups for s in g.samples if s.end is None], "trained", "")

    def finish(self) -> list[Ended]:
        """The run is over: what is left of redundant work ends as surplus."""
        ended = []
        for group in list(self.groups.values()):
            ended += self._reject(group, "surplus", "the run ended")
        return ended

    def _urgency(self, group: Group) -> tuple[float, int]:
        deadline = group.deadline(self.settings.max_staleness)
        return (float("inf") if deadline is None else deadline, group.seq)
