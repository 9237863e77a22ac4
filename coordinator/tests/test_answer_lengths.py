"""Lengths of trained answers against those of all scored answers."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from world import job

from rljob.coordinator.answer_lengths import AnswerLengths, kolmogorov_p
from rljob.coordinator.status_report import status_of

RATIO, P = "response_length/trained_over_scored", "response_length/trained_ks_p"
CUT = "response_length/cut_share"


def lengths(trained: list[int], rest: list[int]) -> AnswerLengths:
    account = AnswerLengths()
    for tokens in trained + rest:
        account.score(tokens)
    for tokens in trained:
        account.train(tokens)
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
        "SELECT s.response_tokens, s.state FROM samples s JOIN groups g ON g.id = s.group_id"
        " WHERE g.kind = 'train' AND s.reward IS NOT NULL"
    )
    trained = [row[0] for row in rows if row[1] == "trained"]
    rest = [row[0] for row in rows if row[1] != "trained"]
    assert len(trained) >= 12
    assert world.run.lengths.metrics() == lengths(trained, rest).metrics()
    assert world.run.lengths.metrics()[CUT] == 0
    shown = {metric.name: metric.value for metric in status_of(world.run).metrics}
    assert {RATIO, P, CUT} <= shown.keys()


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
    before = world.run.lengths._cut
    world.kill_coordinator()
    await world.start()
    assert world.run.lengths._cut == before > 0
    world.connect_all()
    await world.settle()
    (unscored,) = world.store.query(
        "SELECT COUNT(*) FROM samples s JOIN groups g ON g.id = s.group_id WHERE g.kind = 'train'"
        " AND s.reward IS NULL AND g.dispatched IS NOT NULL"
    )
    assert world.run.lengths._cut == unscored[0]
