"""The benchmark of learning: which presets count, its files, and the arguments of its command."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import learning
from benchmarks.learning_cells import Cells
from benchmarks.learning_grid import CORRECTIONS, STALENESS, grid_figures
from benchmarks.learning_plot import plot_curves
from benchmarks.scheduling_statistics import interval


def result(gain: float, distance: float) -> dict:
    return {"gain": gain, "distance": distance, "seconds": 10.0, "rewards": [0.1, 0.2]}


def test_a_preset_counts_if_it_learns_and_differs_from_grpo():
    results = {name: result(0.3, 0.5) for name in learning.TRAINED}
    results["grpo"] = result(0.3, 0.0)
    figures, targets = learning.quick_figures(results)
    assert targets["presets_that_learn"] == {
        "value": len(learning.TRAINED),
        "target": 15,
        "holds": len(learning.TRAINED) >= 15,
    }
    assert targets["least_distance_from_grpo"]["holds"] and "rewards" not in figures["grpo"]
    results["gspo"], results["kimi"] = result(0.3, 1e-9), result(0.1, 0.5)
    figures, targets = learning.quick_figures(results)
    assert [name for name in learning.TRAINED if not figures[name]["learns"]] == ["gspo", "kimi"]
    assert targets["presets_that_learn"]["value"] == len(learning.TRAINED) - 2
    assert not targets["least_distance_from_grpo"]["holds"]
    _, targets = learning.quick_figures({"grpo": result(0.3, 0.0)})
    assert targets == {}, "one cell says nothing of the presets"


def test_a_finished_cell_is_not_computed_again_unless_its_settings_change(tmp_path):
    computed = []

    def get(settings: dict) -> dict:
        return Cells(tmp_path / "cells").get(
            "grpo", settings, lambda: computed.append(settings) or {"n": len(computed)}
        )

    assert [get({"seed": 1}), get({"seed": 1}), get({"seed": 2}), get({"seed": 2})] == [
        {"n": 1}, {"n": 1}, {"n": 2}, {"n": 2},
    ]  # fmt: skip
    assert json.loads((tmp_path / "cells/grpo.json").read_text()) == {"settings": {"seed": 2}, "result": {"n": 2}}


def test_an_interrupted_cell_leaves_no_file(tmp_path):
    def interrupted() -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cells(tmp_path).get("grpo", {}, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_cells_are_presets_and_algorithms_of_manifests():
    found = learning.algorithms("gspo,examples/own_objective.yaml")
    assert [*found] == ["gspo", "own-objective"]
    assert found["gspo"].objective == "gspo" and found["gspo"].minibatches == 4
    assert found["own-objective"].objective == "examples.objectives.spo:spo"
    assert [*learning.code_of(found["own-objective"])] == ["objective"] and learning.code_of(found["gspo"]) == {}
    with pytest.raises(argparse.ArgumentTypeError, match="'ppo2' is neither a manifest nor a preset"):
        learning.algorithms("ppo2")
    with pytest.raises(argparse.ArgumentTypeError, match="two seeds"):
        learning.seeds("1")


def test_differences_of_the_grid_are_of_pairs():
    found = {
        (alpha, name): [{"accuracy_gain": 0.1 * seed + (name == "tis") * 0.2} for seed in range(3)]
        for alpha in STALENESS
        for name in CORRECTIONS
    }
    figures = grid_figures(found)
    assert figures["tis_alpha_2"]["difference"] == pytest.approx(0.2)
    assert figures["tis_alpha_2"]["difference_interval"] == pytest.approx((0.2, 0.2))
    low, high = figures["tis_alpha_2"]["gain_interval"]
    assert low < 0.1 and high > 0.5, "seeds differ more than corrections do"
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3 - 2.776 * 0.7071, 3 + 2.776 * 0.7071), rel=0.02)


def test_the_plot_has_a_line_for_each_cell(tmp_path):
    plot_curves({"grpo": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "mine": [0.5]}, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert text.count('id="line2d_') >= 2 and "<svg" in text
