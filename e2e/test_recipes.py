"""The recipes for GPUs, as far as a machine without one can check them: valid, rendered for a cluster, simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob.api.load import load

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("q*.yaml"))
GPUS = {"qwen2.5-7b-math-8gpu": 8, "qwen2.5-7b-rlvr": 20, "qwen3-30b-a3b-rlvr": 56}
"""Of trainer and engines; a judge has others."""
RLJOB = Path(sys.executable).with_name("rljob")


def rljob(*arguments: object) -> str:
    """Run the command line; return its output."""
    done = subprocess.run([RLJOB, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def gpus(item: dict[str, Any]) -> int:
    """Return the number of GPUs that a pod of an object requests; 0 for an object without pods."""
    containers = item.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    return sum(int(each.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)) for each in containers)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_its_trainer_and_pools_request_gpus(recipe: Path) -> None:
    rljob("validate", "--static", recipe)
    rendered = list(yaml.safe_load_all(rljob("render", recipe)))
    with_gpus = {item["metadata"]["labels"]["rljob.dev/role"] for item in rendered if gpus(item)}
    assert with_gpus == {"trainer", *(f"rollout-{pool.name}" for pool in load(recipe, []).spec.rollouts)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_simulation_of_a_recipe_has_a_best_split(recipe: Path) -> None:
    found = json.loads(rljob("simulate", recipe, "--engines", FOLDER / "speeds.yaml", "--steps", 1, "-o", "json"))
    assert found["gpus"] == GPUS[recipe.stem] and found["best"]
