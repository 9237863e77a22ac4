"""Admission, groups, deadlines and batches: which prompts start, and which groups are trained at which step.

Plain state without I/O or clock, driven by events. The coordinator calls the scheduler and records its decisions.

Invariants:
- At trainer version v at most (α+v+1)·N + redundant groups were started and not rejected since version 0. The lowest
  policy version of a group in batch s is at least s − α, so no trained sample exceeds staleness α.
- A group with redundant members ends with its survivors once all members have ended, or when a batch that is due needs
  it and is the last it may join. They are drawn at random from the scored members: the first would be the shortest.
- A group whose task has a user-written filter waits for its decision between the two: it is sufficient, in ``deciding``
  and not complete. No batch is formed without it if it is the last batch that the group may join.
- A greedy answer, if groups have one, is not among the survivors: the group needs it to be sufficient, and it ends as
  ``baseline`` when the group joins a batch.
- At α = 0 the batches do not depend on timing, only on which groups are accepted: they equal the batches of a
  synchronous loop, in admission order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rljob.scheduling.filters import GroupFilter, Rejection
from rljob.scheduling.groups import Cause, End, Ended, Group, Sample, make_group
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.seeds import derive

MAX_RESTARTS = 2
"""Restarts of a prompt by onDeadline: regenerate. Without a limit, prompts with long answers start again for ever."""


@dataclass(frozen=True)
class Settings:
    """Settings of the manifest: spec.training, spec.scheduling, spec.tasks[].groupFilter."""

    steps: int
    groups_per_batch: int
    samples_per_group: int
    max_staleness: int
    redundant_groups: int
    redundant_members: int
    regenerate: bool
    filters: Mapping[str, GroupFilter]  # by task
    seed: int  # spec.seed: draws the survivors of groups with redundant members
    greedy: bool = False  # each group has one more member, a greedy answer


@dataclass(frozen=True)
class FormedBatch:
    """Result of :meth:`Scheduler.form_batch`.

    ``groups``: the groups of one optimizer step, in admission order; empty if no batch is due. ``ended``: samples that
    ended. ``replaced``: the groups among them that were neither trained nor rejected for their rewards; the caller
    restarts their prompts with :meth:`Scheduler.restart`, so that late prompts do not leave training.
    """

    groups: list[Group]
    ended: list[Ended]
    replaced: list[Group]


class Scheduler:
    """The scheduler of one run. ``version``: the trainer version, the number of optimizer steps applied."""

    def __init__(self, settings: Settings, mixture: Mixture) -> None:
        self.settings = settings
        self.version = 0
        self.groups: dict[str, Group] = {}  # open or complete, not yet in a batch
        self.deciding: dict[str, Group] = {}  # of ``groups``, those that a user-written filter decides about
        self.batches: dict[int, list[Group]] = {}  # formed, not yet trained
        self.rejections_in_a_row = 0
        self.last_rejection = ""  # reason of the last group that a filter rejected
        self.failures_in_a_row = 0
        self.mixture = mixture
        self._next_seq = 0
        self._started = 0  # not rejected, since version 0
        self._complete = 0  # of ``groups``
        self._sufficient = 0  # of ``groups``, those that are not complete
        self._stragglers: list[Group] = []
        """Incomplete groups that were late when a batch was last tried: while they hold it, no other group is looked
        at."""

    # --- admission ---

    def admissible(self) -> int:
        """Return how many groups may start now."""
        s = self.settings
        batches = min(s.max_staleness + self.version + 1, s.steps)
        if batches == 0:
            return 0  # without steps, redundant groups have no use
        return max(0, batches * s.groups_per_batch + s.redundant_groups - self._started)

    def admit(self) -> Group:
        """Start the group of the next prompt. Call it only while :meth:`admissible` is positive."""
        task, row = self.mixture.next()
        return self._start(task, row)

    def _start(self, task: str, row: int, restarts: int = 0) -> Group:
        s = self.settings
        members = s.samples_per_group + s.redundant_members + s.greedy
        group = make_group(f"g{self._next_seq}", self._next_seq, task, row, members, restarts, s.greedy)
        self._next_seq += 1
        self._started += 1
        self.groups[group.id] = group
        return group

    def restore(
        self,
        mixture: Mixture,
        version: int,
        started: int,
        next_seq: int,
        waiting: list[Group],
        accepted: Collection[str] = (),
    ) -> None:
        """Restore a run from its ledger. A group is complete if enough of its samples are scored and none is open, and
        if the user-written filter of its task, if there is one, accepted it.

        Args:
            mixture: the tasks, with the prompts already taken.
            version: trainer version.
            started: number of groups that were started and not rejected.
            next_seq: order of admission of the next group.
            waiting: open or complete groups that are in no batch.
            accepted: ids of the groups that user-written filters accepted.
        """
        self.mixture, self.version, self._started, self._next_seq = mixture, version, started, next_seq
        self.groups = {group.id: group for group in waiting}
        for group in waiting:
            group.sufficient = self._is_sufficient(group)
            if self._is_ended(group) and self.function(group) and group.id not in accepted:
                self.deciding[group.id] = group
            else:
                group.complete = self._is_ended(group)
        self._complete = sum(group.complete for group in waiting)
        self._sufficient = sum(group.sufficient for group in waiting) - self._complete

    @property
    def may_generate(self) -> bool:
        """Whether a sample that starts under the current version can still join a batch. At α = 0 none can from the
        forming of a batch until it is applied; replacements of redundant groups wait for the next version."""
        return self.version + self.settings.max_staleness not in self.batches

    @property
    def has_lead(self) -> bool:
        """Whether a whole batch of complete groups waits, so that no further group should start to generate: samples
        that wait become older. Not while a straggler holds the batch: batches follow each other at once when it ends,
        and until then engines would be idle."""
        return self._complete >= self.settings.groups_per_batch and not self._is_held()

    # --- samples end ---

    def score(self, sample: Sample, reward: float) -> list[Ended]:
        """Record the reward of a sample; return the samples that end with it (a filtered group, surplus members)."""
        group = sample.group
        assert group.id in self.groups and sample.open, f"{sample.id} is already scored"
        sample.reward = reward
        if not group.sufficient and self._is_sufficient(group):
            group.sufficient = True
            self._sufficient += 1
        return self._close(group) if self._is_ended(group) else []

    def fail(self, sample: Sample, reason: str, cause: Cause) -> list[Ended]:
        """End a sample as failed. Its group is rejected unless enough redundant members are left."""
        group = sample.group
        ended = self._end([sample], "failed", reason, cause)
        left = sum(s.end is None for s in group.samples) - (group.baseline is not None)
        if left >= self.settings.samples_per_group and not sample.greedy:
            return ended + (self._close(group) if self._is_ended(group) else [])
        self.failures_in_a_row += 1
        self.mixture.ended(group.task, accepted=False)
        of_group = f"sample {sample.id} of the group failed: {reason}"[:500]
        return ended + self._reject(group, "failed", of_group, "group_failed")

    def _is_sufficient(self, group: Group) -> bool:
        baseline = group.baseline
        has_baseline = not group.greedy or (baseline is not None and baseline.reward is not None)
        return has_baseline and len(group.scored) >= self.settings.samples_per_group

    def _is_ended(self, group: Group) -> bool:
        """Whether no member of a sufficient group is open."""
        return group.sufficient and not any(s.open for s in group.samples)

    def function(self, group: Group) -> str:
        """Return module:attribute of the user-written filter that decides about a group; empty: none does."""
        return self.settings.filters[group.task].function

    def _close(self, group: Group) -> list[Ended]:
        """Draw the survivors of a sufficient group, and filter them: complete it, reject it, or let it wait for
        :meth:`decide`. All other members end as surplus."""
        kept = self._survivors(group)
        rest = [s for s in group.samples if s.end is None and s not in kept and not s.greedy]
        ended = self._end(rest, "surplus", "the group has enough members", "enough_members")
        rejection = self.settings.filters[group.task].rejection([s.reward for s in kept if s.reward is not None])
        if rejection is not None:
            return ended + self._filter(group, rejection)
        if self.function(group):
            self.deciding[group.id] = group
        else:
            self._accept(group)
        return ended

    def decide(self, group: Group, accepted: bool, failure: str = "") -> list[Ended]:
        """Apply the decision of a user-written filter about a group of ``deciding``; return the samples that end.

        Args:
            group: the group.
            accepted: whether it is trained.
            failure: why the filter could not decide; the samples of the group end as failed. Empty: it did.
        """
        del self.deciding[group.id]
        if failure:
            self.failures_in_a_row += 1
            self.mixture.ended(group.task, accepted=False)
            return self._reject(group, "failed", failure, "filter_failed")
        if not accepted:
            reason = f"groupFilter.function {self.function(group)} rejected the group"
            return self._filter(group, Rejection(reason, "function"))
        self._accept(group)
        return []

    def _accept(self, group: Group) -> None:
        self.failures_in_a_row = self.rejections_in_a_row = 0
        self.mixture.ended(group.task, accepted=True)
        group.complete = True
        self._complete += 1
        self._sufficient -= 1

    def _filter(self, group: Group, rejection: Rejection) -> list[Ended]:
        self.failures_in_a_row = 0  # its samples could be finished
        self.rejections_in_a_row += 1
        self.last_rejection = rejection.reason
        self.mixture.ended(group.task, accepted=False)
        return self._reject(group, "filtered", *rejection)

    def _survivors(self, group: Group) -> list[Sample]:
        """Return the members of a group that are trained, in order: drawn at random if more are scored."""
        scored, size = group.scored, self.settings.samples_per_group
        if len(scored) == size:
            return scored
        drawn = sorted(scored, key=lambda sample: derive(self.settings.seed, f"survivor/{sample.id}", 0, 0))[:size]
        return [sample for sample in scored if sample in drawn]

    def _reject(self, group: Group, end: End, reason: str, cause: Cause) -> list[Ended]:
        """End all samples of a group, so that another group may start."""
        del self.groups[group.id]
        self.deciding.pop(group.id, None)
        self._started -= 1
        self._complete -= group.complete
        self._sufficient -= group.sufficient and not group.complete
        return self._end_group(group, end, reason, cause)

    def _end_group(self, group: Group, end: End, reason: str, cause: Cause) -> list[Ended]:
        """End all samples of a group that is removed. It does not have them any more: cycles would occupy memory until
        a collection."""
        ended = self._end([s for s in group.samples if s.end is None], end, reason, cause)
        group.samples = []
        return ended

    def _end(self, samples: list[Sample], end: End, reason: str, cause: Cause) -> list[Ended]:
        for sample in samples:
            sample.end = end
        return [Ended(sample, end, reason, cause) for sample in samples]

    # --- batches ---

    @property
    def lacks_groups(self) -> bool:
        """Whether there are too few groups for a batch."""
        return self._complete + self._sufficient < self.settings.groups_per_batch

    def form_batch(self) -> FormedBatch:
        """Form the batch of step ``version`` if it is due.

        Complete groups are taken earliest deadline first. An incomplete group delays the batch only if this batch is
        the last one it may join. Then it is closed if enough of its redundant members are scored, and the batch waits
        for the decision of its task's user-written filter. Else it ends as ``surplus`` if redundant groups replace it,
        and as ``expired`` if onDeadline is regenerate, unless its prompt was restarted MAX_RESTARTS times: then the
        batch waits for it.
        """
        s, step = self.settings, self.version
        if self.lacks_groups or step >= s.steps or step in self.batches or self._is_held():
            return FormedBatch([], [], [])  # called after every event: the common case must be cheap
        ended: list[Ended] = []
        replaced: list[Group] = []
        deadlines = [(group, group.deadline(s.max_staleness)) for group in self.groups.values()]
        due = [(group, deadline) for group, deadline in deadlines if deadline is not None and deadline <= step]
        for group in [g for g, deadline in due if g.sufficient and deadline < step]:
            # Only if events arrive out of order: its version was unknown when its last batch was formed.
            ended += self._reject(group, "expired", f"too old for batch {step}", "too_old")
            replaced.append(group)
        late = [g for g, _ in due if not g.complete and g.id in self.groups]
        enough = [g for g in late if g.sufficient]
        late = [g for g in late if not g.sufficient]
        self._stragglers = [g for g in late if g.restarts >= MAX_RESTARTS] if s.regenerate else late
        if self._complete + len(enough) < s.groups_per_batch or self._is_held():
            return FormedBatch([], ended, replaced)
        for group in enough:
            if group.id not in self.deciding:
                ended += self._close(group)
        deciding = [g for g in enough if g.id in self.deciding]
        self._stragglers = [*self._stragglers, *deciding]
        if self._complete < s.groups_per_batch or self._is_held():
            return FormedBatch([], ended, replaced)  # filters rejected some, or have not decided
        ready = sorted((g for g in self.groups.values() if g.complete), key=self._urgency)
        chosen, rest = ready[: s.groups_per_batch], ready[s.groups_per_batch :]
        if s.regenerate:
            for group in late:
                ended += self._reject(group, "expired", f"not complete when batch {step} was due", "not_complete")
                replaced.append(group)
        else:
            rest = late + deciding + rest
        for group in rest:
            if self._urgency(group)[0] <= step:
                reason = f"not needed by batch {step}, the last it could join"
                ended += self._reject(group, "surplus", reason, "not_needed")
                replaced.append(group)
        chosen.sort(key=lambda g: g.seq)
        for group in chosen:
            lowest = group.min_version
            assert lowest is not None and step - lowest <= s.max_staleness, f"{group.id} exceeds max_staleness"
            del self.groups[group.id]
            group.step = step
            if group.baseline is not None:
                ended += self._end([group.baseline], "baseline", "", "")
        self._complete -= len(chosen)
        self.batches[step] = chosen
        return FormedBatch(chosen, ended, replaced)

    def _is_held(self) -> bool:
        """Whether more of the stragglers are still late than the batch can do without."""
        tolerated = 0 if self.settings.regenerate else self.settings.redundant_groups
        for group in self._stragglers:
            waits = not group.sufficient or group.id in self.deciding
            if group.id in self.groups and waits and self._urgency(group)[0] <= self.version:
                tolerated -= 1
                if tolerated < 0:
                    return True
        return False

    def awaited(self) -> Group | None:
        """Return the incomplete group with the earliest deadline, the first admitted of these; None without one."""
        return min((group for group in self.groups.values() if not group.complete), default=None, key=self._urgency)

    def restart(self, group: Group) -> Group:
        """Start a new group for the prompt of a replaced one."""
        return self._start(group.task, group.row, group.restarts + 1)

    def trained(self, step: int) -> list[Ended]:
        """Record that batch ``step`` was applied: the version becomes step + 1."""
        assert step == self.version, f"batch {step} applied at version {self.version}"
        self.version = step + 1
        groups = self.batches.pop(step)
        waiting = self.groups.values()
        self.mixture.settle(
            Counter(group.task for group in groups),
            Counter(group.task for group in waiting if group.complete),
            Counter(group.task for group in waiting if not group.complete),
        )
        return [ended for group in groups for ended in self._end_group(group, "trained", "", "")]

    def finish(self) -> list[Ended]:
        """End all groups that are in no batch as surplus: the run is over."""
        ended = []
        for group in list(self.groups.values()):
            ended += self._reject(group, "surplus", "the run ended", "run_ended")
        return ended

    def _urgency(self, group: Group) -> tuple[float, int]:
        deadline = group.deadline(self.settings.max_staleness)
        return (float("inf") if deadline is None else deadline, group.seq)
