"""The benchmark of learning: which presets count, its files, and the arguments of its command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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


def manifest(path: Path, name: str, objective: str = "gpg") -> Path:
    text = Path("examples/own_objective.yaml").read_text()
    text = text.replace("name: own-objective", f"name: {name}").replace("examples.objectives.spo:spo", objective)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (
            "nowhere.objectives:spo",
            r"spec\.algorithm\.objective: module nowhere\.objectives cannot be imported .*working",
        ),
        (
            "examples.objectives.spo:absent",
            r"spec\.algorithm\.objective: module examples\.objectives\.spo has no attribute",
        ),
    ],
)
def test_a_manifest_whose_function_cannot_be_imported_is_no_cell(tmp_path, objective, sentence):
    made = manifest(tmp_path / "job.yaml", "mine", objective)
    with pytest.raises(argparse.ArgumentTypeError, match=sentence) as raised:
        learning.algorithms(f"grpo,{made}")
    assert str(raised.value).startswith(str(made)) and "\n" not in str(raised.value)


def test_two_cells_of_one_name_are_refused(tmp_path):
    first, second = (manifest(tmp_path / f"{name}.yaml", "mine") for name in ("first", "second"))
    assert [*learning.algorithms(f"grpo,{first}")] == ["grpo", "mine"]
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^{second}: another cell is named mine too; remove one"):
        learning.algorithms(f"grpo,{first},{second}")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^gspo: another cell is named gspo too"):
        learning.algorithms("gspo,gspo")
    of_preset = manifest(tmp_path / "grpo.yaml", "grpo")
    with pytest.raises(argparse.ArgumentTypeError, match=r"metadata\.name grpo is that of a preset; change it"):
        learning.algorithms(str(of_preset))


def test_a_preset_that_is_not_trained_is_refused_with_its_reason():
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"^gigpo is no cell: it needs an environment, and without states"
    ):
        learning.algorithms("grpo,gigpo")


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
