"""Lengths of trained answers against those of all scored answers."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from world import job

from rljob.coordinator.answer_lengths import AnswerLengths, kolmogorov_p
from rljob.coordinator.status_report import status_of

RATIO, P = "response_length/trained_over_scored", "response_length/trained_ks_p"
CUT = "response_length/cut_share"


def lengths(trained: list[int], rest: list[int]) -> AnswerLengths:
    """Return the account of answers of which each is a group."""
    return lengths_of_groups([*(([tokens], []) for tokens in trained), *(([], [tokens]) for tokens in rest)])


def lengths_of_groups(groups: Iterable[tuple[list[int], list[int]]]) -> AnswerLengths:
    """Return the account of groups: the lengths of their trained answers, and those of the others."""
    account = AnswerLengths()
    for trained, rest in groups:
        for before, tokens in enumerate(trained + rest):
            account.score(tokens, before)
        for tokens in trained:
            account.train(tokens, 1)
        account.train_group(len(trained), len(trained) + len(rest))
    return account


def test_there_is_no_ratio_before_a_batch() -> None:
    assert lengths([], [5, 6]).metrics() == {}


def test_the_ratio_is_exact_however_long_the_answers_are() -> None:
    trained, rest = [1001, 70_003], [500_009]
    expected = statistics.fmean(trained) / statistics.fmean(trained + rest)
    assert lengths(trained, rest).metrics()[RATIO] == pytest.approx(expected, rel=1e-12)


def test_all_trained_and_empty_answers_are_no_bias() -> None:
    assert lengths([3, 9], []).metrics() == {RATIO: 1.0, P: 1.0, CUT: 0.0}
    assert lengths([0], [0]).metrics() == {RATIO: 1.0, P: 1.0, CUT: 0.0}


def test_a_random_selection_is_not_significant_and_the_shorter_half_is() -> None:
    rng = random.Random(3)
    drawn = [int(rng.lognormvariate(6, 1)) for _ in range(2000)]
    fair = lengths(drawn[:1000], drawn[1000:]).metrics()
    drawn.sort()
    short = lengths(drawn[:1000], drawn[1000:]).metrics()
    assert fair[P] > 0.05 and 0.9 < fair[RATIO] < 1.1
    assert short[P] < 1e-9 and short[RATIO] < 0.6


def test_the_p_value_is_that_of_trained_against_untrained_answers() -> None:
    trained, rest = [1, 2, 3, 4, 5, 9, 9, 9], [2, 4, 6, 8, 10, 12]
    both = [sum(x <= at for x in trained) / 8 - sum(x <= at for x in rest) / 6 for at in range(13)]
    expected = kolmogorov_p(max(map(abs, both)), 8 * 6 / 14)
    assert 0 < expected < 1
    assert lengths(trained, rest).metrics()[P] == pytest.approx(expected)


@pytest.mark.parametrize("within", [0.0, 0.7])
def test_whole_groups_that_are_left_out_at_random_are_not_significant(within: float) -> None:
    """``within``: standard deviation of log-lengths within a group, of 1 in all."""
    rng, p = random.Random(1), []
    for _ in range(50):
        groups = []
        for number in range(60):
            prompt = rng.gauss(0, math.sqrt(1 - within**2))
            answers = [int(800 * math.exp(prompt + rng.gauss(0, within))) for _ in range(8)]
            groups.append(([], answers) if number < 20 else (answers, []))
        p.append(lengths_of_groups(groups).metrics()[P])
    assert sum(each < 0.01 for each in p) <= 2


def test_a_preference_within_groups_and_one_of_groups_are_significant() -> None:
    rng, within, whole = random.Random(2), [], []
    for _ in range(200):
        prompt = rng.gauss(0, 0.7)
        answers = sorted(int(800 * math.exp(prompt + rng.gauss(0, 0.7))) for _ in range(8))
        within.append((answers[:6], answers[6:]))
        whole.append((answers, []) if prompt < 0.3 else ([], answers))
    assert lengths_of_groups(within).metrics()[P] < 1e-9
    assert lengths_of_groups(whole).metrics()[P] < 1e-6


def test_the_asymptotic_p_values_are_those_of_published_tables() -> None:
    for scaled, p in ((1.2239, 0.10), (1.3581, 0.05), (1.6276, 0.01)):  # critical values of the distribution
        assert kolmogorov_p(scaled / 1e4, 1e8) == pytest.approx(p, rel=2e-3)
    assert kolmogorov_p(0.0, 10) == 1.0


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="scipy is not installed")
@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_the_p_value_agrees_with_scipy(shift: int) -> None:
    from scipy.stats import ks_2samp  # optional

    rng = random.Random(shift)
    trained = [rng.randrange(100) for _ in range(900)]
    rest = [rng.randrange(100) + shift for _ in range(700)]
    expected = ks_2samp(trained, rest, method="asymp").pvalue
    assert math.isclose(lengths(trained, rest).metrics()[P], expected, rel_tol=0.02)


async def test_a_restarted_coordinator_continues_the_lengths(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=6, evaluation={"problems": 2}), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.version < 3:
        await world.some(1)
    world.kill_coordinator()
    await world.start()
    world.connect_all()
    await world.settle()
    rows = world.store.query(
        "SELECT s.response_tokens, s.state, g.id FROM samples s JOIN groups g ON g.id = s.group_id"
        " WHERE g.kind = 'train' AND s.reward IS NOT NULL"
    )
    groups: dict[str, tuple[list[int], list[int]]] = {}
    for tokens, state, group in rows:
        groups.setdefault(group, ([], []))[state != "trained"].append(tokens)
    assert sum(len(trained) for trained, _ in groups.values()) >= 12
    assert world.run.lengths.metrics() == lengths_of_groups(groups.values()).metrics()
    assert world.run.lengths.metrics()[CUT] == 0
    shown = {metric.name: metric.value for metric in status_of(world.run).metrics}
    assert {RATIO, P, CUT} <= shown.keys()


async def test_a_restarted_coordinator_knows_scored_members_that_were_not_trained(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(steps=8, alpha=2, g=3, scheduling={"redundancy": {"members": 1}}), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.version < 4:
        await world.some(1)
    before = world.run.lengths._groups
    world.kill_coordinator()
    await world.start()
    assert world.run.lengths._groups == before
    assert before.trained < before.both < before.scored


async def test_cut_answers_are_counted_also_by_the_next_coordinator(new_world: Any, tmp_path: Path) -> None:
    """Redundant groups and members end before their answers do; a batch waits for neither."""
    redundancy = {"redundancy": {"groups": 2, "members": 2}, "onDeadline": "regenerate"}
    world = new_world(job(steps=8, alpha=0, scheduling=redundancy), tmp_path, engines=2)
    await world.start()
    slow = world.agents[1]
    step = slow.step
    slow.step = lambda: (world.run.version % 2 == 1 and step()) or super(type(slow), slow).step()
    world.connect_all()
    for _ in range(2000):
        await world.some(1)
        if world.run.version >= 4:
            break
    before = world.run.lengths
    world.kill_coordinator()
    await world.start()
    assert world.run.lengths._cut == before._cut > 0
    assert world.run.lengths._groups == before._groups
    world.connect_all()
    await world.settle()
    (unscored,) = world.store.query(
        "SELECT COUNT(*) FROM samples s JOIN groups g ON g.id = s.group_id WHERE g.kind = 'train'"
        " AND s.reward IS NULL AND g.dispatched IS NOT NULL"
    )
    assert world.run.lengths._cut == unscored[0]
