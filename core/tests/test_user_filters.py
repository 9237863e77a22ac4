"""Groups about which a user-written filter decides: the scheduler waits for it, and no batch changes with its time."""

from __future__ import annotations

import pytest

from rljob.scheduling.filters import GroupFilter
from rljob.scheduling.groups import Ended, Group
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.scheduler import Scheduler, Settings

FUNCTION = GroupFilter(nonconstant=True, max_mean=2.0, function="mypackage:accept")


def make(n: int = 1, alpha: int = 1, groups: int = 0, members: int = 0, regenerate: bool = False) -> Scheduler:
    """Return a scheduler of groups of two members."""
    return Scheduler(
        Settings(9, n, 2, alpha, groups, members, regenerate, {"sums": FUNCTION}, seed=1), Mixture({"sums": 1.0})
    )


def score(scheduler: Scheduler, group: Group, version: int, *rewards: float) -> list[Ended]:
    """Score the first members of a group."""
    ended = []
    for sample, reward in zip(group.samples, rewards, strict=False):
        sample.min_version = version
        ended += scheduler.score(sample, reward)
    return ended


def test_a_group_is_complete_once_the_filter_has_accepted_it() -> None:
    scheduler = make()
    group = scheduler.admit()
    assert score(scheduler, group, 0, 0.0, 1.0) == []
    assert [*scheduler.deciding] == [group.id] and not group.complete and scheduler.form_batch().groups == []
    assert scheduler.decide(group, True) == []
    assert scheduler.deciding == {} and group.complete and scheduler.form_batch().groups == [group]


def test_a_rejected_group_is_filtered_and_replaced() -> None:
    scheduler = make(alpha=0)
    group = scheduler.admit()
    score(scheduler, group, 0, 0.0, 1.0)
    samples = group.samples
    ended = scheduler.decide(group, False)
    reason = "groupFilter.function mypackage:accept rejected the group"
    assert [(e.sample, e.end, e.reason, e.cause) for e in ended] == [
        (sample, "filtered", reason, "function") for sample in samples
    ]
    assert (scheduler.last_rejection, scheduler.rejections_in_a_row, scheduler.admissible()) == (reason, 1, 1)


def test_a_failure_of_the_filter_fails_the_group_and_counts_until_a_group_is_decided() -> None:
    scheduler = make(n=4)
    for failures in (1, 2, 3):
        group = scheduler.admit()
        score(scheduler, group, 0, 0.0, 1.0)
        ended = scheduler.decide(group, False, "it raised")
        assert {(e.end, e.reason, e.cause) for e in ended} == {("failed", "it raised", "filter_failed")}
        assert len(ended) == 2 and scheduler.failures_in_a_row == failures
    group = scheduler.admit()
    score(scheduler, group, 0, 0.0, 1.0)
    assert scheduler.failures_in_a_row == 3
    scheduler.decide(group, False)
    assert scheduler.failures_in_a_row == 0


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (2.0, 3.0)])
def test_the_function_is_not_asked_about_groups_that_the_other_fields_reject(rewards: tuple[float, float]) -> None:
    scheduler = make()
    ended = score(scheduler, scheduler.admit(), 0, *rewards)
    assert {e.end for e in ended} == {"filtered"} and scheduler.deciding == {}


@pytest.mark.parametrize("regenerate", [False, True])
def test_a_batch_waits_for_a_late_group_until_it_is_decided(regenerate: bool) -> None:
    """At α = 0 both groups are late: the batch has the same groups, whichever is decided first."""
    scheduler = make(n=2, alpha=0, regenerate=regenerate)
    first, second = scheduler.admit(), scheduler.admit()
    score(scheduler, first, 0, 0.0, 1.0)
    score(scheduler, second, 0, 0.0, 1.0)
    scheduler.decide(second, True)
    batch = scheduler.form_batch()
    assert (batch.groups, batch.ended, batch.replaced) == ([], [], [])
    scheduler.decide(first, True)
    assert scheduler.form_batch().groups == [first, second]


@pytest.mark.parametrize("regenerate", [False, True])
def test_a_late_group_that_is_not_decided_holds_a_batch_that_has_enough_others(regenerate: bool) -> None:
    scheduler = make(n=1, alpha=1, regenerate=regenerate)
    late, other = scheduler.admit(), scheduler.admit()
    scheduler.version = 1
    score(scheduler, late, 0, 0.0, 1.0)
    score(scheduler, other, 1, 0.0, 1.0)
    scheduler.decide(other, True)
    batch = scheduler.form_batch()
    assert (batch.groups, batch.ended, scheduler.has_lead) == ([], [], False)
    scheduler.decide(late, True)
    assert scheduler.form_batch().groups == [late]


def test_a_redundant_group_that_is_not_decided_ends_as_surplus() -> None:
    scheduler = make(n=1, alpha=0, groups=1)
    slow, fast = scheduler.admit(), scheduler.admit()
    score(scheduler, slow, 0, 0.0, 1.0)
    score(scheduler, fast, 0, 0.0, 1.0)
    scheduler.decide(fast, True)
    samples = slow.samples
    batch = scheduler.form_batch()
    assert batch.groups == [fast] and batch.replaced == [slow]
    assert [(e.sample, e.end, e.cause) for e in batch.ended] == [(s, "surplus", "not_needed") for s in samples]
    assert scheduler.deciding == {}


def test_a_late_group_is_closed_for_its_batch_which_waits_for_the_decision() -> None:
    scheduler = make(n=1, alpha=0, members=1)
    group = scheduler.admit()
    score(scheduler, group, 0, 0.0, 1.0)
    assert scheduler.deciding == {}, "a member is open"
    batch = scheduler.form_batch()
    assert batch.groups == [] and [(e.sample, e.end) for e in batch.ended] == [(group.samples[2], "surplus")]
    assert [*scheduler.deciding] == [group.id]
    assert scheduler.form_batch().ended == []
    scheduler.decide(group, True)
    assert scheduler.form_batch().groups == [group]


def test_a_batch_that_lost_its_group_to_the_filter_takes_another_one() -> None:
    scheduler = make(n=1, alpha=0)
    group = scheduler.admit()
    score(scheduler, group, 0, 0.0, 1.0)
    assert scheduler.form_batch().groups == []
    scheduler.decide(group, False)
    again = scheduler.admit()
    score(scheduler, again, 0, 0.0, 1.0)
    scheduler.decide(again, True)
    assert scheduler.form_batch().groups == [again]


def test_the_end_of_the_run_ends_groups_that_are_not_decided() -> None:
    scheduler = make()
    group = scheduler.admit()
    score(scheduler, group, 0, 0.0, 1.0)
    assert {(e.end, e.cause) for e in scheduler.finish()} == {("surplus", "run_ended")}
    assert scheduler.deciding == {}


def test_a_restored_group_is_complete_only_with_its_decision() -> None:
    before = make(n=2)
    decided, asked, open_ = (before.admit() for _ in range(3))
    score(before, decided, 0, 0.0, 1.0)
    score(before, asked, 0, 0.0, 1.0)
    score(before, open_, 0, 0.0)
    scheduler = make(n=2)
    scheduler.restore(Mixture({"sums": 1.0}), 0, 3, 3, [decided, asked, open_], {decided.id})
    assert (decided.complete, asked.complete, open_.complete) == (True, False, False)
    assert [*scheduler.deciding] == [asked.id]
    scheduler.decide(asked, True)
    assert scheduler.form_batch().groups == [decided, asked]
