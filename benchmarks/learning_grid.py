"""Staleness × correction × seed on the real system: `rljob run` of the quickstart for each cell.

All cells have the quickstart's learning rate, and the seeds of all cells are the same, so differences between
corrections are of pairs.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.learning_cells import Cells
from benchmarks.learning_plot import save
from benchmarks.scheduling_statistics import interval
from benchmarks.time_to_reward import figures_of, run

STALENESS = (0, 1, 2, 4, 8)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "uncorrected": {"preset": "grpo", "correction": "none"},
    "decoupled": {"preset": "decoupled_ppo"},
    "tis": {"preset": "grpo"},
    "cispo": {"preset": "cispo"},
    "topr": {"preset": "topr"},
}
"""Name → `spec.algorithm`."""
REFERENCE = "uncorrected"
MINIBATCHES = 4

Results = dict[tuple[int, str], list[dict[str, Any]]]
"""(staleness, correction) → result of each seed."""


def grid(cells: Cells, directory: Path, seeds: Sequence[int]) -> Results:
    """Return the results of all cells; seeds are the outer loop, so early results are of whole grids."""
    found: Results = {}
    for seed in seeds:
        for staleness in STALENESS:
            for name, fields in CORRECTIONS.items():
                settings = {"algorithm": fields | {"minibatches": MINIBATCHES}, "staleness": staleness, "seed": seed}
                cell = f"{name}-{staleness}-{seed}"
                result = cells.get(cell, settings, lambda s=settings, c=cell: _run(s, directory / c))
                found.setdefault((staleness, name), []).append(result)
    return found


def _run(settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run one cell; its run directory is removed at its end."""
    shutil.rmtree(directory, ignore_errors=True)
    changes = [
        f"spec.algorithm={json.dumps(settings['algorithm'])}",
        f"spec.training.maxStaleness={settings['staleness']}",
    ]
    figures = figures_of(directory, run(settings["seed"], directory, changes))
    shutil.rmtree(directory)
    return {name: figures[name] for name in ("accuracy_before", "accuracy_after", "accuracy_gain", "run_seconds")}


def grid_figures(found: Results) -> dict[str, Any]:
    """Return the mean gain of each cell with its 95 % interval, and of the paired difference from `uncorrected`."""
    figures: dict[str, Any] = {}
    for (staleness, name), results in found.items():
        gains = [result["accuracy_gain"] for result in results]
        reference = [result["accuracy_gain"] for result in found[staleness, REFERENCE]]
        differences = [gain - other for gain, other in zip(gains, reference, strict=True)]
        figures[f"{name}_alpha_{staleness}"] = {
            "seeds": len(gains),
            "gain": statistics.mean(gains),
            "gain_interval": interval(gains),
            "difference": statistics.mean(differences),
            "difference_interval": interval(differences),
        }
    return figures


def plot_grid(found: Results, path: Path) -> None:
    """Write a plot of the gain over the staleness, a line with intervals for each correction."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in CORRECTIONS:
        gains = [[result["accuracy_gain"] for result in found[staleness, name]] for staleness in STALENESS]
        means = [statistics.mean(each) for each in gains]
        bounds = [interval(each) for each in gains]
        errors = [[mean - low for mean, (low, _) in zip(means, bounds, strict=True)],
                  [high - mean for mean, (_, high) in zip(means, bounds, strict=True)]]  # fmt: skip
        axes.errorbar(STALENESS, means, yerr=errors, label=name, capsize=3)
    axes.set_xlabel("maxStaleness")
    axes.set_ylabel("gain of held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
