"""Environments of Gymnasium as text, with the real package.

The package is not among those of rljob. It is installed into a folder of its own for this test, which needs a package
index; so the test runs with RLJOB_THOROUGH=1, or where Gymnasium is installed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rljob.api.roles import Environment
from rljob.environments.environment_service import make_factory
from rljob.environments.self_check import examine

PACKAGES = ("gymnasium==1.4.0", "farama-notifications==0.0.6")
INSTALLED = find_spec("gymnasium") is not None
pytestmark = pytest.mark.skipif(
    not (INSTALLED or os.environ.get("RLJOB_THOROUGH")), reason="installs Gymnasium; with RLJOB_THOROUGH=1"
)
FUNCTION = "rljob.environments.gymnasium_text:KIND"
MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
LAKE = {
    "id": "FrozenLake-v1",
    "arguments": {"desc": MAP, "is_slippery": False},
    "actions": ["Left", "Down", "Right", "Up"],
}


@pytest.fixture(scope="module", autouse=True)
def gymnasium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install Gymnasium where only this module finds it."""
    folder = tmp_path_factory.mktemp("gymnasium")
    if not INSTALLED:
        uv = Path(sys.executable).parent / "uv"
        subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES], check=True)
        sys.path.insert(0, str(folder))
    yield
    if not INSTALLED:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "gymnasium"]:
            del sys.modules[name]
        sys.modules.pop("rljob.environments.gymnasium_text", None)


def factory(**options: Any) -> Any:
    return make_factory(Environment(name="lake", function=FUNCTION, config=LAKE | options), "spec.environments[0]")


def play(made: Any, actions: list[str], row: int = 1, seed: int = 1) -> list[tuple[str, float, bool, bool]]:
    environment = made()
    environment.reset(seed, {"seed": row})
    found = [environment.step(action)[:4] for action in actions]
    environment.close()
    return found


def test_the_package_has_the_version_for_which_this_is_written() -> None:
    assert version("gymnasium") == "1.4.0"


def test_named_actions_lead_to_the_goal() -> None:
    steps = play(factory(), ["<answer>down</answer>", "Down", " RIGHT ", "right", "down", "Right"])
    assert [step[1:] for step in steps] == [(0.0, False, False)] * 5 + [(1.0, True, False)]
    assert "\x1b[41mG" in steps[-1][0] or "G" in steps[-1][0].splitlines()[-1]


def test_a_text_that_names_no_action_makes_no_step() -> None:
    made = factory(invalidReward=-0.5, maxSteps=3)()
    first, _ = made.reset(1, {"seed": 1})
    text, reward, terminated, truncated, info = made.step("jump")
    assert (text, reward, terminated, truncated) == (first, -0.5, False, False)
    assert info == {"metrics": {"action_is_valid": False}, "metrics_agg_mode": {"action_is_valid": "mean"}}
    made.step("jump")
    assert made.step("jump")[2:4] == (False, True), "invalid answers count, so an episode ends"


def test_observations_as_values_and_actions_as_numbers() -> None:
    made = factory(observation="value", actions=[])
    assert made().actions == ["0", "1", "2", "3"]
    assert made().reset(1, {"seed": 1})[0] == "0"
    assert [step[0] for step in play(made, ["1", "1", "2"])] == ["4", "8", "9"]


def test_the_row_makes_the_problem_and_the_seed_of_the_episode_the_chance() -> None:
    slippery = factory(arguments={"is_slippery": True, "desc": None})
    moves = ["Right", "Down"] * 10

    def episode(row: int, seed: int) -> list[str]:
        environment = slippery()
        texts = [environment.reset(seed, {"seed": row})[0]]
        for move in moves:
            text, _, terminated, truncated, _ = environment.step(move)
            texts.append(text)
            if terminated or truncated:
                break
        return texts

    assert episode(3, 5) == episode(3, 5)
    assert len({tuple(episode(3, seed)) for seed in range(8)}) > 1, "members of a group meet different chances"
    assert len({episode(3, seed)[0] for seed in range(8)}) == 1, "and the same problem"


def test_the_check_finds_no_defect() -> None:
    found = asyncio.run(examine(factory(), 8, 20))
    assert found["problems"] == [] and 1 < found["random"]["mean_steps"] <= 20


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"id": "FrozenLake-v9"}, r"spec\.environments\[0\]\.config\.id: gymnasium cannot make FrozenLake-v9"),
        ({"arguments": {"size": 3}}, r"\.config\.id: gymnasium cannot make FrozenLake-v1: .*size"),
        ({"actions": ["Left", "Right"]}, r"\.config\.actions: 2 names are given and FrozenLake-v1 has 4"),
        ({"actions": ["a", "A", "b", "c"]}, r"\.config\.actions: two names differ in case only"),
        (
            {"id": "Pendulum-v1", "arguments": {}, "actions": [], "observation": "value"},
            r"\.config\.id: Pendulum-v1 has the action space Box.*name an environment with a Discrete one",
        ),
    ],
)
def test_wrong_options_end_the_service_with_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        factory(**options)


def test_an_environment_that_renders_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\.config\.observation: FrozenLake-v1 renders no text; set"):
        factory(arguments={"render_mode": None})
