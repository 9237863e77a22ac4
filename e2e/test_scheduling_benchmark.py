"""Statistics and baselines of the scheduling benchmark."""

from __future__ import annotations

import json
import math
import statistics
from multiprocessing.pool import ThreadPool

import pytest

from benchmarks.scheduling import (
    KOLMOGOROV_P,
    SCENARIOS,
    SPLITS,
    Measurement,
    best_split,
    figures_of_lengths,
    measure,
)
from benchmarks.scheduling_cells import CELLS, Simulations
from benchmarks.scheduling_runs import Figures, Policy, environment, long_answers, one_batch, trajectories
from benchmarks.scheduling_statistics import draw, ratio, same_distribution, student_quantile, uniform


def scenario(name: str) -> dict:
    return json.loads((SCENARIOS / f"{name}.json").read_text())


def test_a_ratio_has_the_interval_of_paired_replications():
    found = ratio([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == {"value": 2.0, "low": 2.0, "high": 2.0}, "every pair has the same ratio"
    found = ratio([2.0, 2.0, 2.0, 2.0, 7.0], [1.0] * 5)
    assert found["value"] == 3.0
    assert found["high"] - 3.0 == pytest.approx(2.776 * math.sqrt(5.0) / math.sqrt(5), rel=0.01)
    assert [student_quantile(n) for n in (4, 19, 199)] == pytest.approx([2.776, 2.093, 1.972], rel=0.005)


def test_the_test_of_distributions_finds_a_shift_and_accepts_equal_ones():
    numbers = [uniform(1, f"s{i}") for i in range(2000)]
    others = [uniform(2, f"s{i}") for i in range(2000)]
    assert same_distribution(numbers, numbers) == 1.0
    assert same_distribution(numbers, others) > 0.01
    assert same_distribution(numbers, [number * 0.9 for number in others]) < 0.01


def test_left_out_answers_show_a_preference_that_trained_against_submitted_answers_do_not():
    numbers = [uniform(1, f"s{i}") for i in range(3000)]
    longer = [2 * uniform(2, f"s{i}") for i in range(100)]
    found = figures_of_lengths([Figures(1.0, lengths=numbers, submitted=numbers + longer, left_out=longer)])
    assert found["lengths_p"] > KOLMOGOROV_P > 1e-6 > found["left_out_p"]
    assert (found["left_out"], found["mean_length"] < 1) == (100, True)
    assert figures_of_lengths([Figures(1.0, lengths=numbers, submitted=numbers)])["left_out_p"] is None


@pytest.mark.parametrize("groups", [0, 2])
def test_only_redundant_groups_leave_answers_out_that_could_be_trained(groups):
    shape = {"nodes": 3, "groups": 4, "members": 2, "slots_per_node": 8, "train_node_seconds": 100}
    run = long_answers(scenario("rlvr_long") | shape, 1, Policy(alpha=1, groups=groups), 8, 2)
    if groups:
        assert 0 < len(run.left_out) < len(run.submitted) - len(run.lengths), "the last groups are not among them"
    else:
        assert sorted(run.submitted) == sorted(run.lengths) and not run.left_out


def test_draws_have_the_distributions_of_the_files():
    answers = scenario("rlvr_long")["sample_seconds"]
    drawn = [draw(answers, uniform(1, f"s{i}")) for i in range(4000)]
    assert statistics.median(drawn) == pytest.approx(40, rel=0.05)
    assert statistics.stdev(math.log(x) for x in drawn if x < 540) == pytest.approx(0.9, rel=0.05)
    assert max(drawn) == 540
    seconds = environment(scenario("redundant_env"), 1)
    slow = [latency for i in range(4000) if (latency := seconds(f"s{i}", 0)) > 40]
    assert len(slow) / 4000 == pytest.approx(0.02, abs=0.007)


def test_the_best_split_has_the_shortest_step_of_those_with_young_samples():
    steps, ages = [5.0, 3.0, 2.0, 4.0], [2.0, 2.2, 2.4, 2.6]
    assert best_split(steps, ages, math.inf) == SPLITS[2]
    assert best_split(steps, ages, 2.3) == SPLITS[1]
    assert best_split(steps, ages, 1.0) == SPLITS[2], "no split is young enough: the target is then missed"


@pytest.fixture
def simulations(tmp_path):
    """Return a function that returns simulations with the same directory, in threads."""
    with ThreadPool(2) as pool:
        yield lambda code="code": Simulations(pool, tmp_path, code)


def test_an_interrupted_benchmark_continues_with_the_missing_cells(simulations, tmp_path):
    computed = []

    def simulated(scenario: dict, seed: int, policy: Policy, steps: int) -> Figures:
        computed.append(seed)
        return Figures(seconds=seed / 3, ages=[policy.alpha] * steps, events=10)

    seeds, others = 3 * CELLS, (Policy(alpha=2), 4)
    found = simulations().start(simulated, seeds, {}, *others).get()
    assert found == [simulated({}, seed, *others) for seed in range(1, seeds + 1)], "in the order of seeds"

    computed.clear()
    assert simulations().start(simulated, seeds, {}, *others).get() == found
    assert computed == []
    (removed,) = [path for path in tmp_path.iterdir() if '"seeds": [4, 5, 6]' in path.read_text()]
    removed.unlink()
    assert simulations().start(simulated, seeds, {}, *others).get() == found
    assert computed == [4, 5, 6]


def test_a_cell_of_another_policy_scenario_number_of_steps_or_code_is_simulated(simulations):
    computed = []

    def simulated(scenario: dict, seed: int, policy: Policy, steps: int) -> Figures:
        computed.append((scenario, policy, steps))
        return Figures(seconds=1.0)

    first = ({}, Policy(), 4)
    for arguments in (first, ({"slots": 2}, Policy(), 4), ({}, Policy(groups=1), 4), ({}, Policy(), 5)):
        simulations().start(simulated, 1, *arguments).get()
    assert len(computed) == 4
    simulations().start(simulated, 1, *first).get()
    assert len(computed) == 4
    simulations(code="other").start(simulated, 1, *first).get()
    assert len(computed) == 5


def test_scenarios_have_their_own_rates_and_all_events_together(simulations, monkeypatch):
    def simulated(cpu: float):
        def run(scenario: dict, seed: int, *others) -> Figures:
            return Figures(seconds=1.0 + seed, events=100, cpu=cpu)

        run.__name__ = f"run_{cpu}"
        return run

    monkeypatch.setattr("benchmarks.scheduling.one_batch", simulated(1.0))
    monkeypatch.setattr("benchmarks.scheduling.one_answer_each", simulated(4.0))
    found = Measurement(simulations(), 0.1)
    measure(["queue", "replication"], found, keep=False)
    assert found.figures["scenarios"] == {"queue": 100.0, "replication": 25.0}
    assert found.figures["simulated_events_per_second"] == pytest.approx(100 * (60 + 40) / (60 + 160))
    assert found.figures["queue_speedup"]["value"] == 1.0
    assert not found.targets["queue_speedup"]["holds"]


def test_whole_batches_take_the_time_of_the_longest_samples():
    """The baseline of the queue starts 8 groups at a time; the production scheduler replaces each rejected group."""
    seconds = {
        baseline: statistics.fmean(
            one_batch(scenario("queue"), seed, Policy(groups=0 if baseline else 16, baseline=baseline)).seconds
            for seed in (1, 2, 3)
        )
        for baseline in (True, False)
    }
    assert seconds[True] > 2 * seconds[False]


def test_a_barrier_makes_every_turn_as_slow_as_its_slowest_environment():
    shape = scenario("env_async") | {"groups": 2, "members": 2, "turns": 3}
    latency = environment(shape, 7)
    samples = [f"g{group}.{member}" for group in range(2) for member in range(2)]
    together = trajectories(shape, 7, Policy(), 1, True).seconds
    alone = trajectories(shape, 7, Policy(), 1, False).seconds
    assert together == pytest.approx(sum(0.2 + max(latency(s, turn) for s in samples) for turn in range(3)))
    assert alone == pytest.approx(max(sum(0.2 + latency(s, turn) for turn in range(3)) for s in samples))
