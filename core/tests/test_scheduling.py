"""The scheduler in virtual time: the staleness bound, conservation of samples, synchronous batches at α = 0."""

from __future__ import annotations

import copy
import dataclasses
import heapq
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.scheduling.dispatch import EngineLoad, Request, RequestQueue
from rljob.scheduling.filters import FILTERS
from rljob.scheduling.groups import Ended, Group
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.scheduler import MAX_RESTARTS, Scheduler, Settings


def make(steps=6, n=3, g=2, alpha=1, groups=0, members=0, regenerate=False, accept="none", **weights) -> Scheduler:
    options = Settings(steps, n, g, alpha, groups, members, regenerate, FILTERS[accept])
    return Scheduler(options, Mixture(weights or {"sums": 1.0}))


@dataclass
class Outcome:
    batches: list[list[str]]
    ended: list[Ended]
    admitted: list[Group]
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
            outcome.admitted.append(group)
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
                outcome.admitted.append(group)
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
                outcome.ended += scheduler.fail(payload, "injected failure")
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
    }
)


@settings(max_examples=120, deadline=None)
@given(runs, st.booleans())
def test_every_sample_ends_once_and_no_batch_is_older_than_the_bound(run: dict, regenerate: bool) -> None:
    accept = run["accept"] if run["g"] > 1 else "none"
    regenerate = regenerate and run["alpha"] > 0
    scheduler = make(6, run["n"], run["g"], run["alpha"], run["groups"], run["members"], regenerate, accept)
    outcome = simulate(scheduler, run["seed"], run["slots"], failures=run["failures"])
    ends = Counter(entry.sample.id for entry in outcome.ended)
    assert set(ends) == {s.id for group in outcome.admitted for s in group.samples}
    assert set(ends.values()) == {1}
    trained = [name for batch in outcome.batches for name in batch]
    assert len(trained) == len(set(trained)) == 6 * run["n"] * run["g"]
    assert {e.sample.id for e in outcome.ended if e.end == "trained"} == set(trained)
    assert all(0 <= age <= run["alpha"] for age in outcome.ages)


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


def test_redundant_members_replace_failures_or_end_as_surplus() -> None:
    scheduler = make(n=1, g=2, members=1)
    group = scheduler.admit()
    assert [e.end for e in scheduler.fail(group.samples[0], "broken")] == ["failed"]
    assert not complete(scheduler, Group("", 0, "", 0, group.samples[1:]), 0, 0.0, 1.0)
    assert group.complete
    other = scheduler.admit()
    ended = complete(scheduler, other, 0, 0.0, 1.0)
    assert [(e.sample.id, e.end) for e in ended] == [("g1.2", "surplus")]


def test_a_filtered_group_is_replaced_at_once() -> None:
    scheduler = make(n=1, g=2, alpha=0, accept="nonconstant")
    ended = complete(scheduler, scheduler.admit(), 0, 1.0, 1.0)
    assert [e.end for e in ended] == ["filtered", "filtered"]
    assert scheduler.admissible() == 1


def test_a_prompt_that_was_regenerated_twice_is_waited_for() -> None:
    scheduler = make(steps=10, n=1, g=1, alpha=1, regenerate=True)
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
    assert restarts == straggler.restarts == MAX_RESTARTS
    complete(scheduler, straggler, scheduler.version - 1, 1.0)
    assert scheduler.form_batch().groups == [straggler]


def test_a_filtered_group_was_finished_and_resets_the_count_of_failures() -> None:
    scheduler = make(n=1, g=2, alpha=0, accept="nonconstant")
    for _ in range(3):
        scheduler.fail(scheduler.admit().samples[0], "broken")
    assert scheduler.failures_in_a_row == 3
    complete(scheduler, scheduler.admit(), 0, 1.0, 1.0)
    assert (scheduler.failures_in_a_row, scheduler.rejections_in_a_row) == (0, 1)


def loaded(name: str, slots: int, requests: int) -> EngineLoad:
    """Return an engine that runs ``requests`` requests of 100 tokens."""
    engine = EngineLoad(name, slots, 1000)
    for number in range(requests):
        engine.add(Request((name, number, 0), name, (1, 0, number), 100))
    return engine


def assign(engines: list[EngineLoad], groups: int, members: int) -> list[str]:
    """Queue requests of 100 tokens and assign them; return the engine of each, in order."""
    queue = RequestQueue()
    for group in range(groups):
        for member in range(members):
            queue.put(Request((f"g{group}.{member}", 0, 0), f"g{group}", (1, group, member), 100))
    return [engine.instance for _, engine in queue.assign(engines, lambda engine, request: True)]


def test_a_group_is_not_packed_onto_a_small_engine() -> None:
    large, small = loaded("large", 64, 32), loaded("small", 4, 1)
    assert assign([large, small], 1, 8) == ["small"] * 3 + ["large"] * 5, "it runs 4 and holds none"
    assert assign([loaded("one", 8, 0), loaded("two", 8, 0)], 2, 2) == ["one", "one", "two", "two"], "one prefix each"


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 20)), min_size=1, max_size=5), st.integers(1, 9))
def test_no_request_is_held_while_an_engine_has_a_free_slot(sizes: list[tuple[int, int]], members: int) -> None:
    engines = [loaded(f"e{number}", slots, min(had, slots)) for number, (slots, had) in enumerate(sizes)]
    assign(engines, 4, members)
    held = [engine for engine in engines if len(engine.requests) > engine.max_concurrency]
    assert not held or all(engine.busy for engine in engines)


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
    verdict = True
    scheduler.settings = dataclasses.replace(scheduler.settings, accept=lambda rewards: verdict)
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
        scheduler.score(group.samples[0], 1.0)
        running = [group for group in running if group.id in scheduler.groups]
    assert abs(shares["hard"] - weight * 10 * n) <= n, "within one batch in ten"
