"""Which algorithms learn the quickstart's task, with one learning rate for all.

    python -m benchmarks.learning --json --quick [--cells grpo,gspo,job.yaml] [--plot curves.svg] [--keep]
    python -m benchmarks.learning --json [--seeds 1,2,3,4,5] [--plot staleness.svg] [--keep]

With ``--quick`` each cell is a preset, or the algorithm of a manifest. It trains the quickstart's model in this process
(`benchmarks/learning_training.py`): 40 batches of 4 updates, sampled one version before. ``learns``: held-out accuracy
rises by at least 0.15. ``distance``: of the weights' change by one batch, which is the same for all cells, from the
change by GRPO, relative to GRPO's; a preset whose change equals GRPO's is GRPO, and does not count. `NOT_TRAINED` has
the presets that are no cells, with the reason.

Without ``--quick`` each cell is a run of the real system (`rljob run examples/quickstart.yaml`, 3 minutes on a quiet
machine): staleness × correction × seed (`benchmarks/learning_grid.py`).

A finished cell is kept in --directory: an interrupted benchmark continues there. Remove the directory after a change of
rljob.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import time_limit
from benchmarks.learning_cells import Cells
from benchmarks.learning_grid import grid, grid_figures, plot_grid
from benchmarks.learning_plot import plot_curves
from benchmarks.learning_training import MINIBATCHES, PROBLEMS, STEPS, change, learn, make_model
from benchmarks.report import report, target
from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_functions import FUNCTIONS
from rljob.api.algorithm_presets import POLICY, PRESETS, fill, frozen_models, model_pools
from rljob.api.load import load
from rljob.trainer.preflight import reference_problems

TIMEOUT_SECONDS = 12 * 3600.0
SEED = 1
GAIN, LEARNING_PRESETS = 0.15, 15
QUICK_SECONDS = 2400.0
DISTANCE = 1e-3
CHANGES = {"vapo": {"criticWarmupSteps": 5}}
"""Fields of presets: the published warm-up of VAPO's critic is longer than a cell."""
DIRECTORY = Path("runs/learning")
REFERENCE = "grpo"
NOT_TRAINED = {
    "distillation": "needs a teacher, and this benchmark has the policy only",
    "gigpo": "needs an environment, and without states of one its advantages are those of GRPO",
}
"""Preset → why it is no cell."""
TRAINED = tuple(name for name in PRESETS if name not in NOT_TRAINED)


def algorithms(text: str) -> dict[str, Algorithm]:
    """Return the algorithm of each comma-separated preset or manifest, with MINIBATCHES updates unless it sets them.

    Raises:
        argparse.ArgumentTypeError: there is no such preset or manifest, it cannot be trained, or two cells have one
            name.
    """
    found: dict[str, Algorithm] = {}
    for given in text.split(","):
        if given in TRAINED:
            name, algorithm = given, Algorithm.model_validate({"preset": given, **CHANGES.get(given, {})})
        elif given in NOT_TRAINED:
            raise argparse.ArgumentTypeError(f"{given} is no cell: it {NOT_TRAINED[given]}; leave it out")
        elif Path(given).exists():
            name, algorithm = of_manifest(Path(given))
        else:
            known = ", ".join(TRAINED)
            raise argparse.ArgumentTypeError(f"{given!r} is neither a manifest nor a preset; presets are {known}")
        if name in found:
            raise argparse.ArgumentTypeError(
                f"{given}: another cell is named {name} too; remove one of them, or change metadata.name of a manifest"
            )
        if algorithm.minibatches is None:
            algorithm.minibatches = MINIBATCHES
        fill(algorithm)
        found[name] = algorithm
    return found


def of_manifest(path: Path) -> tuple[str, Algorithm]:
    """Return name and algorithm of a manifest.

    Raises:
        argparse.ArgumentTypeError: it is not valid, has the name of a preset, or a function that cannot be imported, or
            needs another model than the policy.
    """
    try:
        job = load(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    name, algorithm = job.metadata.name, job.spec.algorithm
    if name in PRESETS:
        raise argparse.ArgumentTypeError(f"{path}: metadata.name {name} is that of a preset; change it")
    for problem in reference_problems(job.spec):
        if problem.startswith("spec.algorithm."):  # the backend of this benchmark is its own
            raise argparse.ArgumentTypeError(f"{path}: {problem}; the working directory is {Path.cwd()}")
    if others := {*frozen_models(algorithm).values(), *model_pools(algorithm).values()} - {POLICY}:
        raise argparse.ArgumentTypeError(f"{path} needs {min(others)}, and this benchmark has the policy only")
    return name, algorithm


def seeds(text: str) -> list[int]:
    """Return comma-separated seeds.

    Raises:
        argparse.ArgumentTypeError: there are fewer than two, which have no interval.
    """
    found = [int(seed) for seed in text.split(",")]
    if len(found) < 2:
        raise argparse.ArgumentTypeError("give at least two seeds: one has no interval")
    return found


def code_of(algorithm: Algorithm) -> dict[str, str]:
    """Return the hash of the file of each function of a user's own, by field."""
    found = {}
    for field in FUNCTIONS:
        module, mark, _ = str(getattr(algorithm, field)).partition(":")
        if mark:
            file = inspect.getsourcefile(importlib.import_module(module))
            assert file is not None
            found[field] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def quick(chosen: dict[str, Algorithm], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each cell, GRPO's first."""
    model = make_model(directory, SEED)
    cells = Cells(directory / "quick")
    reference = algorithms(REFERENCE)[REFERENCE]
    of_reference: list[torch.Tensor] = []

    def compute(name: str, algorithm: Algorithm) -> dict[str, Any]:
        began = time.perf_counter()
        of_reference.extend([] if of_reference else [change(model, reference, SEED)])
        distance = (change(model, algorithm, SEED) - of_reference[0]).norm() / of_reference[0].norm()
        result = learn(model, algorithm, SEED, STEPS, name) | {"distance": float(distance)}
        return result | {"seconds": time.perf_counter() - began}

    results = {}
    for name, algorithm in chosen.items():
        settings = {"algorithm": algorithm.model_dump(mode="json"), "steps": STEPS, "problems": PROBLEMS, "seed": SEED}
        settings["code"] = code_of(algorithm)
        results[name] = cells.get(name, settings, lambda n=name, a=algorithm: compute(n, a))
    return results


def quick_figures(results: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return figures and targets. The number of presets that learn is a target if all presets are cells."""
    figures: dict[str, Any] = {}
    learning = 0
    for name, result in results.items():
        distinct = name == REFERENCE or result["distance"] > DISTANCE
        learns = result["gain"] >= GAIN and distinct
        learning += learns and name in TRAINED
        figures[name] = {key: value for key, value in result.items() if key != "rewards"} | {"learns": learns}
    distances = [result["distance"] for name, result in results.items() if name != REFERENCE]
    targets = {"least_distance_from_grpo": target(min(distances), ">=", DISTANCE)} if distances else {}
    if results.keys() >= set(TRAINED):
        targets["presets_that_learn"] = target(learning, ">=", LEARNING_PRESETS)
        targets["seconds"] = target(sum(results[name]["seconds"] for name in TRAINED), "<=", QUICK_SECONDS)
    return figures, targets


def main() -> None:
    """Run the cells that are missing and print the result of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--quick", action="store_true", help="presets in this process; else staleness on the system")
    what = "with --quick: comma-separated presets and manifests (default: all but NOT_TRAINED)"
    parser.add_argument("--cells", type=algorithms, default=",".join(TRAINED), help=what)
    parser.add_argument(
        "--seeds", type=seeds, default="1,2,3,4,5", help="without --quick: at least two, comma-separated"
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"of finished cells (default {DIRECTORY})")
    parser.add_argument("--plot", type=Path, help="file of a plot, for example curves.svg")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/learning.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.learning", options.timeout)
    if options.quick:
        results = quick(options.cells, options.directory)
        figures, targets = quick_figures(results)
        if options.plot:
            plot_curves({name: result["rewards"] for name, result in results.items()}, options.plot)
        report("learning", figures, targets, options.keep)
        return
    found = grid(Cells(options.directory / "grid"), options.directory, options.seeds)
    if options.plot:
        plot_grid(found, options.plot)
    report("learning_staleness", grid_figures(found), {}, options.keep)


if __name__ == "__main__":
    main()
