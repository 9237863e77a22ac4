"""The scheduler in virtual time: the staleness bound, conservation of samples, synchronous batches at α = 0."""

from __future__ import annotations

import copy
import dataclasses
import gc
import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.scheduling import dispatch
from rljob.scheduling.dispatch import RequestQueue
from rljob.scheduling.engine_ranks import EngineRanks
from rljob.scheduling.filters import GroupFilter
from rljob.scheduling.groups import Ended, Group, Sample
from rljob.scheduling.mixture import MAX_REJECTIONS_IN_A_ROW, Mixture
from rljob.scheduling.request import EngineLoad, Request, SharedPrefix
from rljob.scheduling.scheduler import Scheduler, Settings

ABOVE_0 = GroupFilter(min_mean=0.5)


def make(
    steps=6, n=3, g=2, alpha=1, groups=0, members=0, regenerate=False, accept="none", greedy=False, **weights
) -> Scheduler:
    weights = weights or {"sums": 1.0}
    filters = dict.fromkeys(weights, GroupFilter(accept == "nonconstant"))
    options = Settings(steps, n, g, alpha, groups, members, regenerate, filters, seed=1, greedy=greedy)
    return Scheduler(options, Mixture(weights))


@dataclass
class Outcome:
    batches: list[list[str]]
    ended: list[Ended]
    admitted: list[str]  # samples
    ages: list[int]
    waited: int = 0


def simulate(scheduler: Scheduler, seed: int, slots: int, training: float = 1.0, failures: float = 0.0) -> Outcome:
    """Simulate a run in virtual time: long-tailed samples, ``slots`` concurrent, in order of admission."""
    rng = random.Random(seed)
    outcome = Outcome([], [], [], [])
    waiting: list = []
    events: list = []  # (time, tie, kind, payload)
    running, tie, clock, training_until = 0, 0, 0.0, False

    def push(at: float, kind: str, payload: object) -> None:
        nonlocal tie
        tie += 1
        heapq.heappush(events, (at, tie, kind, payload))

    while scheduler.version < scheduler.settings.steps:
        for _ in range(scheduler.admissible()):
            group = scheduler.admit()
            outcome.admitted += [sample.id for sample in group.samples]
            waiting += group.samples
        waiting = [s for s in waiting if s.open]
        while waiting and running < slots and scheduler.may_generate:
            sample = waiting.pop(0)
            sample.min_version = scheduler.version
            running += 1
            push(clock + rng.lognormvariate(0, 1.2), "done", sample)
        if not training_until:
            step, batch = scheduler.version, scheduler.form_batch()
            for late in batch.replaced:
                group = scheduler.restart(late)
                outcome.admitted += [sample.id for sample in group.samples]
                waiting += group.samples
            outcome.ended += batch.ended
            if batch.groups:
                outcome.batches.append([s.id for g in batch.groups for s in g.samples if s.end is None])
                outcome.ages += [step - s.min_version for g in batch.groups for s in g.samples if s.end is None]
                training_until = True
                push(clock + training, "trained", step)
            if batch.replaced:
                continue
        assert events, "the run is stuck"
        clock, _, kind, payload = heapq.heappop(events)
        if kind == "trained":
            training_until = False
            outcome.ended += scheduler.trained(payload)
        else:
            running -= 1
            if payload.open and rng.random() < failures:
                outcome.ended += scheduler.fail(payload, "injected failure", "runner")
            elif payload.open:
                outcome.ended += scheduler.score(payload, float(rng.random() < 0.5))
    outcome.ended += scheduler.finish()
    return outcome


runs = st.fixed_dictionaries(
    {
        "alpha": st.integers(0, 4),
        "n": st.integers(1, 4),
        "g": st.integers(1, 3),
        "groups": st.integers(0, 3),
        "members": st.integers(0, 2),
        "accept": st.sampled_from(["none", "nonconstant"]),
        "seed": st.integers(0, 10_000),
        "slots": st.integers(1, 12),
        "failures": st.sampled_from([0.0, 0.1]),
        "greedy": st.booleans(),
    }
)


@settings(max_examples=120, deadline=None)
@given(runs, st.booleans())
def test_every_sample_ends_once_and_no_batch_is_older_than_the_bound(run: dict, regenerate: bool) -> None:
    accept = run["accept"] if run["g"] > 1 else "none"
    regenerate = regenerate and run["alpha"] > 0
    shape = (run["n"], run["g"], run["alpha"], run["groups"], run["members"])
    scheduler = make(6, *shape, regenerate, accept, run["greedy"])
    outcome = simulate(scheduler, run["seed"], run["slots"], failures=run["failures"])
    ends = Counter(entry.sample.id for entry in outcome.ended)
    assert set(ends) == set(outcome.admitted)
    assert set(ends.values()) == {1}
    trained = [name for batch in outcome.batches for name in batch]
    assert len(trained) == len(set(trained)) == 6 * run["n"] * run["g"]
    assert {e.sample.id for e in outcome.ended if e.end == "trained"} == set(trained)
    baselines = {e.sample.id for e in outcome.ended if e.end == "baseline"}
    assert baselines == ({f"{name.split('.')[0]}.0" for name in trained} if run["greedy"] else set())
    assert all(0 <= age <= run["alpha"] for age in outcome.ages)


def test_groups_that_ended_are_freed_without_the_garbage_collector() -> None:
    scheduler = make(steps=6, groups=1, members=1, accept="nonconstant")
    kept = WeakSet[Sample]()

    def score(sample: Sample, reward: float, score: Any = scheduler.score) -> list[Ended]:
        kept.add(sample)
        return score(sample, reward)

    scheduler.score = score  # type: ignore[method-assign]
    gc.disable()
    try:
        ends = Counter(entry.end for entry in simulate(scheduler, 1, 8, failures=0.1).ended)
        assert {"trained", "filtered", "surplus", "failed"} <= ends.keys()
        assert len(kept) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("accept", ["none", "nonconstant"])
def test_at_alpha_zero_batches_do_not_depend_on_timing(accept: str) -> None:
    def batches(slots: int) -> list[list[str]]:
        scheduler = make(8, 4, 3, alpha=0, accept=accept)
        rewards = random.Random(7)
        table: dict[str, float] = {}
        score = scheduler.score
        # The reward is a function of the sample, as with a seeded engine; only the order of events differs.
        scheduler.score = lambda s, _: score(s, table.setdefault(s.id, float(hash_bit(s.id))))  # type: ignore[method-assign]
        assert rewards
        return simulate(scheduler, slots, slots).batches

    assert batches(1) == batches(5) == batches(64)


def hash_bit(name: str) -> int:
    return random.Random(name).random() < 0.5


def test_admission_is_bounded_by_version_and_staleness() -> None:
    scheduler = make(steps=10, n=4, alpha=2)
    assert scheduler.admissible() == 12
    for _ in range(12):
        scheduler.admit()
    assert scheduler.admissible() == 0
    assert make(steps=2, n=4, alpha=8).admissible() == 8, "only groups that the run can train are started"
    assert make(steps=10, n=4, alpha=0, groups=3).admissible() == 7


def complete(scheduler: Scheduler, group: Group, version: int, *rewards: float) -> list[Ended]:
    ended = []
    for sample, reward in zip(group.samples, rewards, strict=False):
        sample.min_version = version
        ended += scheduler.score(sample, reward)
    return ended


def test_a_batch_waits_for_a_straggler_only_if_it_is_the_last_batch_the_straggler_may_join() -> None:
    scheduler = make(n=1, g=1, alpha=1)
    straggler, quick = scheduler.admit(), scheduler.admit()
    straggler.samples[0].min_version = 0
    complete(scheduler, quick, 0, 1.0)
    batch = scheduler.form_batch()
    assert batch.groups == [quick]
    scheduler.trained(0)
    third = scheduler.admit()
    complete(scheduler, third, 1, 1.0)
    assert not scheduler.form_batch().groups, "batch 1 is the last the straggler may join"
    complete(scheduler, straggler, 0, 0.0)
    batch = scheduler.form_batch()
    assert batch.groups == [straggler], "earliest deadline first"


def test_a_batch_that_a_straggler_holds_is_formed_once_the_straggler_is_late_no_more() -> None:
    """Stragglers are remembered between calls: their state counts, not that they were late once."""
    for engine_is_lost in (False, True):
        scheduler = make(n=1, g=1, alpha=0)
        straggler = scheduler.admit()
        straggler.samples[0].min_version = 0
        quick = scheduler._start("sums", 1)
        complete(scheduler, quick, 0, 0.0)
        for _ in range(2):
            assert not scheduler.form_batch().groups, "the straggler holds the batch"
        if engine_is_lost:
            straggler.samples[0].min_version = None
            assert scheduler.form_batch().groups == [quick]
        else:
            complete(scheduler, straggler, 0, 0.0)
            assert scheduler.form_batch().groups == [straggler]


def test_a_group_that_exceeds_the_staleness_bound_expires_and_restarts() -> None:
    scheduler = make(n=1, g=1, alpha=1)
    for _ in range(2):
        complete(scheduler, scheduler.admit(), 0, 1.0)
    old = scheduler.groups["g1"]
    for step in (0, 1):
        scheduler.form_batch()
        scheduler.trained(step)
    straggler = scheduler.admit()
    complete(scheduler, straggler, 0, 1.0)  # its version was unknown until now
    batch = scheduler.form_batch()
    assert old.step == 1 and not batch.groups and batch.replaced == [straggler]
    assert [(e.sample.group, e.end) for e in batch.ended] == [(straggler, "expired")]


def test_regenerate_expires_a_late_group_and_restarts_its_prompt() -> None:
    scheduler = make(n=1, g=1, alpha=1, regenerate=True)
    straggler, quick = scheduler.admit(), scheduler.admit()
    straggler.samples[0].min_version = 0
    complete(scheduler, quick, 0, 1.0)
    scheduler.form_batch()
    scheduler.trained(0)
    complete(scheduler, scheduler.admit(), 1, 1.0)
    batch = scheduler.form_batch()
    assert batch.groups and [e.end for e in batch.ended] == ["expired"]
    again = scheduler.restart(straggler)
    assert batch.replaced == [straggler] and (again.task, again.row, again.restarts) == ("sums", straggler.row, 1)


def test_redundant_groups_replace_late_ones() -> None:
    scheduler = make(n=2, g=1, alpha=0, groups=1)
    late, *quick = [scheduler.admit() for _ in range(3)]
    late.samples[0].min_version = 0
    for group in quick:
        complete(scheduler, group, 0, 1.0)
    batch = scheduler.form_batch()
    assert batch.groups and [(e.sample.id, e.end) for e in batch.ended] == [("g0.0", "surplus")]
    assert scheduler.admissible() == 1 and batch.replaced == [late], "its prompt does not leave training"


def test_redundant_members_replace_failures() -> None:
    scheduler = make(n=1, g=2, members=1)
    group = scheduler.admit()
    assert [e.end for e in scheduler.fail(group.samples[0], "broken", "runner")] == ["failed"]
    assert not complete(scheduler, Group("", 0, "", 0, group.samples[1:]), 0, 0.0, 1.0)
    assert group.complete
    other = scheduler.admit()
    assert not complete(scheduler, other, 0, 0.0, 1.0) and not other.complete
    assert [e.end for e in scheduler.fail(other.samples[2], "broken", "runner")] == ["failed"]
    assert other.complete, "the last open member failed"


def test_members_are_cut_only_when_a_batch_would_wait_for_their_group() -> None:
    scheduler = make(n=1, g=2, members=1, alpha=1)
    slow, quick = scheduler.admit(), scheduler.admit()
    for sample in slow.samples:
        sample.min_version = 0
    complete(scheduler, slow, 0, 0.0, 1.0)
    assert slow.sufficient and not scheduler.form_batch().groups, "it may join the next batch too"
    complete(scheduler, quick, 0, 0.0, 1.0, 0.0)
    assert scheduler.form_batch().groups == [quick]
    scheduler.trained(0)
    batch = scheduler.form_batch()
    assert batch.groups == [slow], "its last batch"
    assert [(e.sample.id, e.end) for e in batch.ended] == [("g0.2", "surplus")]


def test_a_group_that_is_cut_and_rejected_is_replaced() -> None:
    scheduler = make(n=1, g=2, members=1, alpha=0, accept="nonconstant")
    group = scheduler.admit()
    group.samples[2].min_version = 0
    complete(scheduler, group, 0, 1.0, 1.0)
    batch = scheduler.form_batch()
    assert not batch.groups and [e.end for e in batch.ended] == ["surplus", "filtered", "filtered"]
    assert scheduler.admissible() == 1 and scheduler.rejections_in_a_row == 1
    complete(scheduler, scheduler.admit(), 0, 0.0, 1.0)
    assert scheduler.form_batch().groups, "the count of sufficient groups is right after a rejection"


def test_a_straggler_with_enough_members_holds_a_batch_no_longer() -> None:
    scheduler = make(n=2, g=1, members=1, alpha=0)
    groups = [scheduler.admit(), scheduler.admit(), scheduler._start("sums", 2)]
    for group in groups:
        for sample in group.samples:
            sample.min_version = 0
    for group in groups[:2]:
        complete(scheduler, group, 0, 1.0)
    assert not scheduler.form_batch().groups, "the third group is late"
    complete(scheduler, groups[2], 0, 1.0)
    assert len(scheduler.form_batch().groups) == 2


def test_survivors_are_drawn_at_random_whatever_the_order_of_the_scores() -> None:
    """Of three members two survive, in their order. Each member survives in two thirds of the groups."""
    survived: Counter[int] = Counter()
    for number in range(300):
        kept = set()
        for order in ((0, 1, 2), (2, 1, 0)):
            scheduler = make(n=1, g=2, members=1)
            group = scheduler._start("sums", 0)
            for position, sample in enumerate(group.samples):
                sample.id = f"g{number}.{position}"
            ended = [entry for member in order for entry in scheduler.score(group.samples[member], 1.0)]
            assert [(entry.end, entry.sample.reward) for entry in ended] == [("surplus", 1.0)]
            kept.add(tuple(sample.member for sample in group.scored))
        (members,) = kept
        survived.update(members)
    assert all(160 <= survived[member] <= 240 for member in range(3)), survived


def test_a_restored_group_is_complete_only_if_no_member_is_open() -> None:
    scheduler = make(n=1, g=2, members=1, alpha=0)
    group = scheduler.admit()
    group.samples[2].min_version = 0
    complete(scheduler, group, 0, 1.0, 1.0)
    again = make(n=1, g=2, members=1, alpha=0)
    again.restore(scheduler.mixture, 0, 1, 1, [copy.deepcopy(group)])
    assert not again.groups["g0"].complete
    assert [s.id for g in again.form_batch().groups for s in g.scored] == ["g0.0", "g0.1"]


def test_no_group_starts_while_a_batch_of_complete_groups_waits_unless_a_straggler_holds_it() -> None:
    scheduler = make(steps=20, n=4, g=1, alpha=3)
    groups = [scheduler.admit() for _ in range(scheduler.admissible())]
    groups[0].samples[0].min_version = 0
    for group in groups[1:4]:
        complete(scheduler, group, 0, 1.0)
    assert not scheduler.has_lead
    for group in groups[4:6]:
        complete(scheduler, group, 0, 1.0)
    assert scheduler.has_lead, "5 wait for a batch of 4"
    for step in range(3):
        assert scheduler.form_batch().groups
        scheduler.trained(step)
        groups += [scheduler.admit() for _ in range(scheduler.admissible())]
        for group in groups[6 + 4 * step : 10 + 4 * step]:
            complete(scheduler, group, step, 1.0)
    assert scheduler.has_lead and not scheduler.form_batch().groups, "the first group is late"
    assert not scheduler.has_lead, "its batches follow each other at once, so the engines must not wait"
    complete(scheduler, groups[0], 0, 1.0)
    assert scheduler.has_lead and scheduler.form_batch().groups


def test_a_filtered_group_is_replaced_at_once() -> None:
    scheduler = make(n=1, g=2, alpha=0, accept="nonconstant")
    ended = complete(scheduler, scheduler.admit(), 0, 1.0, 1.0)
    assert [e.end for e in ended] == ["filtered", "filtered"]
    assert scheduler.admissible() == 1


@pytest.mark.parametrize(
    ("kind", "least", "most", "rewards", "reason"),
    [
        (False, -math.inf, math.inf, [1.0, 1.0], None),
        (True, -math.inf, math.inf, [1.0, 1.0], ("the group's rewards are all equal", "equal_rewards")),
        (True, 0.25, 0.75, [1.0, 0.0], None),
        (True, 0.25, 0.75, [0.5, 0.0], None),  # the bounds are inclusive
        (True, 0.25, 0.75, [1.0, 0.5], None),
        (True, 0.25, 0.75, [0.4, 0.0], ("the group's mean reward 0.2 is below groupFilter.minMean 0.25", "mean_below")),
        (False, 0.25, 0.75, [1.0, 1.0], ("the group's mean reward 1 is above groupFilter.maxMean 0.75", "mean_above")),
        (False, -math.inf, 0.75, [-1.0, -3.0], None),
    ],
)
def test_a_group_is_filtered_by_its_rewards(
    kind: bool, least: float, most: float, rewards: list[float], reason: tuple[str, str] | None
) -> None:
    assert GroupFilter(kind, least, most).rejection(rewards) == reason


def test_each_task_has_its_own_filter() -> None:
    scheduler = make(steps=9, n=4, g=2, alpha=0, strict=1.0, open=1.0)
    filters = {"strict": GroupFilter(True, 0.3, 0.7), "open": GroupFilter()}
    scheduler.settings = dataclasses.replace(scheduler.settings, filters=filters)
    ends: dict[tuple[str, float], list[str]] = {}
    for rewards in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.5)):
        for _ in range(2):
            group = scheduler.admit()
            ends[group.task, sum(rewards)] = [e.reason for e in complete(scheduler, group, 0, *rewards)][:1]
    assert all(ends["open", total] == [] for total in (0.0, 0.5, 1.0, 1.5))
    assert ends["strict", 1.0] == []
    assert ends["strict", 0.0] == ["the group's rewards are all equal"]
    assert ends["strict", 0.5] == ["the group's mean reward 0.25 is below groupFilter.minMean 0.3"]
    assert ends["strict", 1.5] == ["the group's mean reward 0.75 is above groupFilter.maxMean 0.7"]
    assert scheduler.last_rejection == ends["strict", 1.5][0]


@pytest.mark.parametrize("redundant", [0, 1])
def test_a_prompt_that_was_regenerated_twice_is_waited_for(redundant: int) -> None:
    """A redundant group does not replace it either."""
    scheduler = make(steps=10, n=1, g=1, alpha=1, groups=redundant, regenerate=True)
    straggler, restarts = scheduler.admit(), 0
    straggler.samples[0].min_version = 0
    for _ in range(10):
        complete(scheduler, scheduler.admit(), scheduler.version, 1.0)
        batch = scheduler.form_batch()
        for late in batch.replaced:
            straggler, restarts = scheduler.restart(late), restarts + 1
            straggler.samples[0].min_version = scheduler.version
        if not batch.groups:
            break
        scheduler.trained(scheduler.version)
    assert restarts == straggler.restarts == 2
    complete(scheduler, straggler, scheduler.version - 1, 1.0)
    assert scheduler.form_batch().groups == [straggler]


def test_a_filtered_group_was_finished_and_resets_the_count_of_failures() -> None:
    scheduler = make(n=1, g=2, alpha=0, accept="nonconstant")
    for _ in range(3):
        scheduler.fail(scheduler.admit().samples[0], "broken", "runner")
    assert scheduler.failures_in_a_row == 3
    complete(scheduler, scheduler.admit(), 0, 1.0, 1.0)
    assert (scheduler.failures_in_a_row, scheduler.rejections_in_a_row) == (0, 1)


def test_an_accepted_group_resets_the_counts_of_failures_and_rejections() -> None:
    scheduler = make(n=1, g=2, alpha=0, accept="nonconstant")
    for step in range(3):
        for _ in range(2):
            complete(scheduler, scheduler.admit(), step, 1.0, 1.0)
        scheduler.fail(scheduler.admit().samples[0], "broken", "runner")
        assert (scheduler.failures_in_a_row, scheduler.rejections_in_a_row) == (1, 2)
        complete(scheduler, scheduler.admit(), step, 0.0, 1.0)
        assert (scheduler.failures_in_a_row, scheduler.rejections_in_a_row) == (0, 0)
        assert scheduler.form_batch().groups
        scheduler.trained(step)


def test_a_batch_takes_the_group_with_the_earliest_deadline_not_the_first_admitted() -> None:
    scheduler = make(n=1, g=1, alpha=2)
    first, late_start, early_start = [scheduler.admit() for _ in range(3)]
    early_start.samples[0].min_version = 0
    complete(scheduler, first, 0, 1.0)
    assert scheduler.form_batch().groups == [first]
    scheduler.trained(0)
    complete(scheduler, late_start, 1, 1.0)
    complete(scheduler, early_start, 0, 1.0)
    for step, group in ((1, early_start), (2, late_start)):
        assert scheduler.form_batch().groups == [group]
        scheduler.trained(step)


def test_the_awaited_group_is_the_most_urgent_of_those_that_are_not_complete() -> None:
    scheduler = make(n=3, g=1, alpha=1)
    groups = [scheduler.admit() for _ in range(3)]
    assert scheduler.awaited() is groups[0], "none has a version: the first admitted"
    groups[1].samples[0].min_version = 1
    groups[2].samples[0].min_version = 0
    assert scheduler.awaited() is groups[2]
    for group, version, following in ((groups[2], 0, groups[1]), (groups[1], 1, groups[0]), (groups[0], 1, None)):
        complete(scheduler, group, version, 1.0)
        assert scheduler.awaited() is following


def loaded(name: str, slots: int, requests: int) -> EngineLoad:
    """Return an engine that runs ``requests`` requests of 100 tokens."""
    engine = EngineLoad(name, slots, 1000)
    for number in range(requests):
        engine.add(Request((name, number, 0), SharedPrefix(), (1, 0, number), 100))
    return engine


def new_queue() -> RequestQueue[EngineLoad]:
    """Return a queue without requests and engines."""
    return RequestQueue(EngineRanks[EngineLoad]())


def set_engines(queue: RequestQueue[EngineLoad], engines: list[EngineLoad]) -> None:
    """Have exactly these engines get the requests of a queue."""
    queue.engines.refresh()
    for engine in [each for each in queue.engines.available() if each not in engines]:
        queue.engines.remove(engine)
    for engine in engines:
        if queue.engines.member(engine) is None:
            queue.engines.add(engine)


def queue_of(groups: int, members: int) -> RequestQueue[EngineLoad]:
    """Return a queue of requests of 100 tokens, named GROUP.MEMBER."""
    queue = new_queue()
    for group in range(groups):
        prefix = SharedPrefix()
        for member in range(members):
            queue.put(Request((f"g{group}.{member}", 0, 0), prefix, (1, group, member), 100))
    return queue


def drain(
    queue: RequestQueue[EngineLoad], engines: list[EngineLoad], start_groups: bool = True
) -> list[tuple[str, str]]:
    """Assign what can be assigned; return (sample, engine) in order."""
    set_engines(queue, engines)
    assigned = queue.assign(lambda engine, kind: True, start_groups)
    return [(request.key[0], engine.instance) for request, engine in assigned]


def test_a_group_is_not_packed_onto_a_small_engine() -> None:
    large, small = loaded("large", 64, 32), loaded("small", 4, 1)
    found = drain(queue_of(1, 8), [large, small])
    assert [engine for _, engine in found] == ["small"] * 2 + ["large"] * 6, "it runs 4 and holds none"


def test_while_slots_are_free_for_all_requests_they_are_balanced_over_the_engines() -> None:
    found = drain(queue_of(2, 4), [loaded("one", 8, 0), loaded("two", 8, 0)])
    assert Counter(engine for _, engine in found) == {"one": 4, "two": 4}
    assert {engine for sample, engine in found if sample.startswith("g0.")} == {"one", "two"}


@pytest.mark.parametrize(("prefix_tokens", "largest"), [(0, 1), (99, 1), (100, 2), (200, 3)])
def test_while_slots_are_free_members_follow_each_other_as_far_as_the_prefix_costs(
    prefix_tokens: int, largest: int
) -> None:
    """Four requests of 100 tokens, and four engines that run one each. An engine that is ahead of the others by no more
    than the tokens of the prefix gets the next one, too."""
    queue, prefix = new_queue(), SharedPrefix()
    for member in range(4):
        key = (f"g0.{member}", 0, 0)
        queue.put(Request(key, prefix, (1, 0, member), 100, prefix_tokens=prefix_tokens))
    found = drain(queue, [loaded(f"e{number}", 8, 1) for number in range(4)])
    assert max(Counter(engine for _, engine in found).values()) == largest


@pytest.mark.parametrize("engines", [1, 3, 14])
def test_while_requests_wait_for_slots_a_group_stays_on_its_engine(engines: int) -> None:
    """Slots become free one by one, of random engines. All but a few members find the prefix of their group."""
    rng, pool = random.Random(engines), [loaded(f"e{number}", 4, 0) for number in range(engines)]
    queue = queue_of(12 * engines, 8)
    assigned = drain(queue, pool)
    while len(queue) > 8 * engines:
        engine = rng.choice([engine for engine in pool if engine.requests])
        engine.remove(next(iter(engine.requests)))
        assigned += drain(queue, pool)
        assert all(engine.free_slots == 0 for engine in pool), "no slot stays free for affinity"
    assert queue.members.share >= 0.9
    started = {sample.split(".")[0] for sample, _ in assigned}
    assert max(int(name[1:]) for name in started) == len(started) - 1, "groups start in order"


def test_the_next_turn_goes_to_the_engine_of_the_previous_one_unless_another_one_is_idle() -> None:
    one, two = loaded("one", 4, 4), loaded("two", 4, 4)
    queue = queue_of(1, 3)
    turn = Request(("s", 1, 0), SharedPrefix(), (1, 9, 0), 100, previous=two)
    queue.put(turn)
    two.remove(next(iter(two.requests)))
    assert drain(queue, [one, two])[0] == ("s", "two"), "before the next group, which is older"
    assert (queue.turns.sent, queue.turns.at_home) == (1, 1)
    queue = queue_of(1, 1)
    queue.put(Request(("t", 1, 0), SharedPrefix(), (1, -1, 0), 100, previous=loaded("gone", 4, 0)))
    assert drain(queue, [loaded("three", 4, 3)]) == [("t", "three"), ("g0.0", "three")], "its engine is gone"
    queue = new_queue()
    queue.put(Request(("u", 1, 0), SharedPrefix(), (1, 9, 0), 100, previous=one))
    assert drain(queue, [one, loaded("free", 4, 0)]) == [("u", "free")], "one could only hold it"
    assert queue.turns.share == 0.0


@pytest.mark.parametrize(("ahead", "chosen"), [(0, "home"), (8, "home"), (9, "other")])
def test_a_next_turn_goes_home_while_slots_are_free_unless_home_is_far_ahead(ahead: int, chosen: str) -> None:
    home, other = loaded("home", 64, 3 + ahead), loaded("other", 64, 3)
    queue = new_queue()
    queue.put(Request(("s", 1, 0), SharedPrefix(), (1, 0, 0), 100, previous=home))
    assert drain(queue, [home, other]) == [("s", chosen)]


def test_groups_do_not_start_when_they_must_not_but_the_members_of_started_ones_do() -> None:
    engine = loaded("one", 4, 2)
    queue = queue_of(3, 4)
    evaluation = Request(("e", 0, 0), SharedPrefix(), (0, 0, 0), 100, version=3)
    assert not drain(queue, [engine], start_groups=False)
    queue.put(evaluation)
    assert drain(queue, [engine], start_groups=False) == [("e", "one")]
    first = drain(queue, [engine])
    assert [sample for sample, _ in first] == ["g0.0", "g0.1", "g0.2", "g0.3", "g1.0"]
    for key in list(engine.requests):
        engine.remove(key)
    assert [sample for sample, _ in drain(queue, [engine], start_groups=False)] == ["g1.1", "g1.2", "g1.3"]
    assert len(queue) == 4


def test_a_group_of_a_lost_engine_goes_to_another_one_in_its_order() -> None:
    one, two = loaded("one", 4, 0), loaded("two", 4, 4)
    queue = queue_of(3, 6)
    drain(queue, [one])
    assert ("g1.1", 0, 0) in one.requests and len(queue) == 10, "it runs four and holds four"
    for key in list(two.requests):
        two.remove(key)
    found = [sample for sample, _ in drain(queue, [two])]
    assert found[:4] == ["g1.2", "g1.3", "g1.4", "g1.5"] and found[4].startswith("g2")


@pytest.mark.parametrize("turn", [False, True])
def test_a_busy_engine_takes_no_request_whose_home_is_another_engine(turn: bool) -> None:
    """It could only hold the request, and the home has the prefix."""
    home, busy = loaded("home", 4, 8), loaded("busy", 4, 4)
    queue = new_queue()
    prefix = SharedPrefix() if turn else SharedPrefix(home)
    queue.put(Request(("s", 1, 0), prefix, (1, 0, 0), 100, previous=home if turn else None))
    assert home.free_slots == 0 < busy.free_slots and not drain(queue, [home, busy])
    home.remove(next(iter(home.requests)))
    assert drain(queue, [home, busy]) == [("s", "home")]


def test_members_behind_a_cancelled_one_are_sent() -> None:
    """The home of a group changes, and the next member is cancelled while it waits for that home."""
    first, second = loaded("first", 4, 7), loaded("second", 4, 0)
    queue, prefix = new_queue(), SharedPrefix()
    members = [Request((f"s{member}", 0, 0), prefix, (1, 0, member), 100) for member in range(4)]
    for request in members:
        queue.put(request)
    assert drain(queue, [first]) == [("s0", "first")], "it had one place"
    queue.cancel(members[1])
    assert drain(queue, [second]) == [("s2", "second"), ("s3", "second")] and len(queue) == 0


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 20)), min_size=1, max_size=5), st.integers(1, 9))
def test_no_request_is_held_while_an_engine_has_a_free_slot(sizes: list[tuple[int, int]], members: int) -> None:
    engines = [loaded(f"e{number}", slots, min(had, slots)) for number, (slots, had) in enumerate(sizes)]
    drain(queue_of(4, members), engines)
    held = [engine for engine in engines if len(engine.requests) > engine.max_concurrency]
    assert not held or all(engine.busy for engine in engines)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))
def test_every_request_is_sent_once_whatever_engines_and_requests_come_and_go(
    engines: int, members: int, seed: int
) -> None:
    rng = random.Random(seed)
    pool = [loaded(f"e{number}", rng.randint(1, 6), 0) for number in range(engines)]
    queue, prefixes = new_queue(), [SharedPrefix() for _ in range(6)]
    waiting, done = {}, set()
    for number, prefix in enumerate(prefixes):
        for member in range(members):
            request = Request((f"g{number}.{member}", 0, 0), prefix, (1, number, member), 100)
            waiting[request.key] = request
            queue.put(request)
    for _ in range(400):
        present = [engine for engine in pool if rng.random() < 0.8]
        set_engines(queue, present)
        for request, engine in queue.assign(lambda engine, kind: True, rng.random() < 0.7):
            assert request.engine is engine and waiting.pop(request.key) is request
        for engine in pool:
            for key in [key for key in engine.requests if rng.random() < 0.3]:
                request = engine.remove(key)
                if rng.random() < 0.2:  # the engine was lost
                    waiting[key] = request
                    queue.put(request)
                else:
                    done.add(key)
        assert len(queue) == len(waiting)
    assert len(done) + sum(len(engine.requests) for engine in pool) == 6 * members and not waiting


@pytest.mark.parametrize("home", [False, True])
def test_cancelled_requests_leave_the_queue(home: bool) -> None:
    """Thousands of samples are cancelled behind one that no engine takes; groups whose home is away are as well."""
    away, queue = loaded("away", 4, 4), new_queue()
    kept = Request(("kept", 0, 0), SharedPrefix(), (0, 0, 0), 100)
    queue.put(kept)
    for number in range(10_000):
        prefix = SharedPrefix(away if home else None)
        request = Request((f"s{number}", 0, 0), prefix, (1, number, 0), 100, previous=away if number % 2 else None)
        queue.put(request)
        queue.cancel(request)
    kinds = list(queue._kinds.values())
    entries = sum(len(heap) for kind in kinds for heaps in (kind._heaps, kind._firsts) for heap in heaps.values())
    assert entries == queue._entries <= 100
    assert drain(queue, [loaded("one", 4, 0)]) == [("kept", "one")]


def test_the_mixture_keeps_weights_to_within_one_prompt() -> None:
    mixture = Mixture({"a": 3.0, "b": 1.0, "c": 0.5})
    taken = Counter()
    for i in range(1, 200):
        task, row = mixture.next()
        assert row == taken[task]
        taken[task] += 1
        for name, share in {"a": 3 / 4.5, "b": 1 / 4.5, "c": 0.5 / 4.5}.items():
            assert abs(taken[name] - share * i) < 1.5
    resumed = Mixture({"a": 3.0, "b": 1.0, "c": 0.5}, copy.deepcopy(mixture.shares))
    assert [resumed.next() for _ in range(20)] == [mixture.next() for _ in range(20)]


def taken(mixture: Mixture, prompts: int) -> Counter[str]:
    """Take prompts; return how many each task has of them."""
    return Counter(mixture.next()[0] for _ in range(prompts))


def test_accepted_groups_that_wait_for_a_batch_count_as_prompts_of_their_task() -> None:
    mixture = Mixture({"a": 1.0, "b": 1.0})
    mixture.settle({}, complete={"a": 4}, open_={})
    assert taken(mixture, 4) == {"b": 4}
    assert taken(mixture, 6) == {"a": 3, "b": 3}


def test_a_task_that_was_not_trained_for_long_is_owed_one_batch() -> None:
    """Else the others would get no prompt for as long as it was not trained."""
    mixture = Mixture({"a": 1.0, "b": 1.0})
    for _ in range(20):
        mixture.settle({"b": 4}, {}, {})
    assert taken(mixture, 8) == {"a": 8}, "a is 4 groups behind its share, b 4 ahead"
    assert taken(mixture, 6) == {"a": 3, "b": 3}


def test_the_acceptance_rate_of_a_task_follows_its_latest_groups() -> None:
    mixture = Mixture({"a": 1.0, "b": 1.0})
    for accepted in (False, True):
        before = mixture.shares["a"].rate
        for _ in range(20):
            mixture.ended("a", accepted)
            mixture.settle({}, {}, {})
        assert abs(mixture.shares["a"].rate - before) > 0.6, "policies improve"
    assert mixture.shares["b"].rate == 1.0


@pytest.mark.parametrize("how", ["failed", "filtered", "not decided"])
def test_groups_that_are_lost_lower_the_acceptance_rate_of_their_task(how: str) -> None:
    """However a group is lost, its task gets more prompts for each group that it owes."""
    scheduler = make(steps=9, n=8, g=1, alpha=0, hard=1.0, easy=1.0)
    hard = GroupFilter(function="package:accept") if how == "not decided" else ABOVE_0
    scheduler.settings = dataclasses.replace(scheduler.settings, filters={"hard": hard, "easy": GroupFilter()})
    lost = 0
    while scheduler.admissible():
        group = scheduler.admit()
        lost += group.task == "hard"
        if group.task == "hard" and how == "failed":
            scheduler.fail(group.samples[0], "broken", "runner")
        else:
            complete(scheduler, group, 0, 0.0)
        if group.id in scheduler.deciding:
            scheduler.decide(group, accepted=False, failure="the filter raised")
    assert len(scheduler.form_batch().groups) == 8 <= lost
    scheduler.trained(0)
    rates = {task: share.rate for task, share in scheduler.mixture.shares.items()}
    assert rates["easy"] == 1.0 and rates["hard"] < 0.2


@pytest.mark.parametrize("alpha", [0, 2])
def test_a_task_without_accepted_groups_takes_the_prompts_of_its_weight(alpha: int) -> None:
    """And the share of its weight again, as soon as its groups are accepted."""
    scheduler = make(steps=60, n=8, g=1, alpha=alpha, rejected=1.0, easy=1.0)
    filters = dict.fromkeys(("rejected", "easy"), ABOVE_0)
    scheduler.settings = dataclasses.replace(scheduler.settings, filters=filters)
    started, trained = Counter[int](), Counter[int]()
    while scheduler.version < 60:
        step = scheduler.version
        while scheduler.admissible():
            group = scheduler.admit()
            started[step] += group.task == "rejected"
            if scheduler.may_generate:
                complete(scheduler, group, step, float(group.task == "easy" or step >= 30))
        trained[step] = sum(group.task == "rejected" for group in scheduler.form_batch().groups)
        scheduler.trained(step)
    assert sum(started[step] for step in range(20)) >= MAX_REJECTIONS_IN_A_ROW
    assert all(started[step] <= 8 + 1 for step in range(20, 30)), "half of the weight, as many as the other task trains"
    assert abs(sum(trained[step] for step in range(35, 60)) - 25 * 4) <= 8


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 4), st.sampled_from([0.1, 0.3, 1.0]), st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 4),
    st.integers(0, 1000),
)  # fmt: skip
def test_trained_groups_follow_the_weights_whatever_the_filter_rejects(
    alpha: int, acceptance: float, weight: float, redundant: int, seed: int
) -> None:
    """A task of long samples whose groups are rejected more often. Ten steps, after ten steps to learn its rate."""
    n, steps, rng = 8, 20, random.Random(seed)
    scheduler = make(steps, n, 1, alpha, redundant, hard=weight, easy=1 - weight)
    scheduler.settings = dataclasses.replace(scheduler.settings, filters=dict.fromkeys(("hard", "easy"), ABOVE_0))
    running: list[Group] = []
    shares: Counter[str] = Counter()
    while scheduler.version < steps:
        running += [scheduler.admit() for _ in range(scheduler.admissible())]
        for group in running:
            if group.samples[0].min_version is None and scheduler.may_generate:
                group.samples[0].min_version = scheduler.version
        formed = scheduler.form_batch()
        running = [group for group in running if group.id in scheduler.groups]
        running += [scheduler.restart(group) for group in formed.replaced]
        if formed.groups:
            shares.update(group.task for group in formed.groups if scheduler.version >= 10)
            scheduler.trained(scheduler.version)
            continue
        able = [group for group in running if not group.complete and group.samples[0].min_version is not None]
        quick = [group for group in able if group.task == "easy" or rng.random() < 0.2]
        group = rng.choice(quick or able)
        verdict = group.task == "easy" or rng.random() < acceptance
        scheduler.score(group.samples[0], float(verdict))
        running = [group for group in running if group.id in scheduler.groups]
    assert abs(shares["hard"] - weight * 10 * n) <= n, "within one batch in ten"


def test_a_group_whose_version_is_known_too_late_has_its_own_cause() -> None:
    scheduler = make(steps=3, n=1, g=1, alpha=1)
    late, *others = [scheduler.admit() for _ in range(scheduler.admissible())]
    assert complete(scheduler, others[0], 0, 1.0) == []
    scheduler.form_batch()
    scheduler.trained(0)
    scheduler.version = 2  # events arrived out of order
    assert complete(scheduler, late, 0, 1.0) == []
    another = scheduler.admit()
    assert complete(scheduler, another, 2, 1.0) == []
    ended = scheduler.form_batch().ended
    assert [(e.sample.group.id, e.end, e.cause) for e in ended] == [(late.id, "expired", "too_old")]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_waiting_request_of_each_kind_and_home_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    queue, prefixes = new_queue(), [SharedPrefix() for _ in range(4)]
    monkeypatch.setattr(dispatch, "FEWEST_ENTRIES", seed % 3)
    engines = [EngineLoad(f"e{n}", 2, 64) for n in range(3)]
    waiting: list[Request] = []
    for number in range(300):
        group, length = draw.randrange(4), draw.choice((32, 64))
        previous = draw.choice([None, None, None, *engines])
        key = (f"g{group}.{number}", 0, 0, "")
        request = Request(
            key, prefixes[group], (1, group, draw.randrange(8) * 1000 + number), 8, None, length, previous, 4
        )
        queue.put(request)
        waiting.append(request)
        if draw.random() < 0.4:
            queue.cancel(draw.choice(waiting))
        if draw.random() < 0.4:
            set_engines(queue, engines)
            _ = list(queue.assign(lambda engine, kind: draw.random() < 0.6))
            for engine in engines:
                for held in [*engine.requests]:
                    if draw.random() < 0.6:
                        engine.remove(held)
        waiting = [each for each in waiting if each.queued]
        assert len(queue) == len(waiting)
        first: dict[object, Request] = {}
        for each in sorted(waiting, key=lambda request: request.order, reverse=True):
            first[each.kind, each.home] = each
        places = [(kind, home) for kind, waiting_ in queue._kinds.items() for home in list(waiting_._heaps)]
        found = {(kind, home): queue._kinds[kind].head(home) for kind, home in places}
        assert {place: entry[2] for place, entry in found.items() if entry is not None} == first
        queue._refresh()
        for kind, of_kind in queue._kinds.items():
            for ability in {queue.engines.ability(engine) for engine in engines}:
                homes = [each for each in engines if queue.engines.ability(each) == ability]
                entry = of_kind.first(ability)
                heads = [first[kind, home] for home in homes if (kind, home) in first]
                assert (None if entry is None else entry[2]) is min(heads, key=lambda each: each.order, default=None)


def test_a_group_waits_for_its_greedy_answer_which_no_member_replaces() -> None:
    scheduler = make(n=1, g=2, members=1, greedy=True)
    group = scheduler.admit()
    assert [sample.greedy for sample in group.samples] == [True, False, False, False]
    for sample in group.samples[1:]:
        sample.min_version = 0
        assert scheduler.score(sample, 1.0) == []
    assert not group.sufficient
    group.samples[0].min_version = 0
    ended = scheduler.score(group.samples[0], 0.5)
    assert [entry.end for entry in ended] == ["surplus"] and group.complete and len(group.scored) == 2
    batch = scheduler.form_batch()
    assert [(entry.sample.id, entry.end) for entry in batch.ended] == [("g0.0", "baseline")]
    assert len([sample for sample in batch.groups[0].samples if sample.end is None]) == 2


def test_a_group_whose_greedy_answer_fails_is_rejected() -> None:
    scheduler = make(n=1, g=2, members=1, greedy=True)
    group = scheduler.admit()
    samples = list(group.samples)
    assert {entry.sample for entry in scheduler.fail(samples[0], "no", "runner")} == set(samples)


def test_a_greedy_answer_replaces_no_member_that_failed() -> None:
    scheduler = make(n=1, g=2, members=1, greedy=True)
    group = scheduler.admit()
    _, first, second, third = group.samples
    assert [entry.sample for entry in scheduler.fail(first, "no", "runner")] == [first]
    assert [entry.sample for entry in scheduler.fail(second, "no", "runner")][:1] == [second]
    assert third.end == "failed" and group.id not in scheduler.groups, "one member and the greedy answer are left"
