"""The files of a new environment: `rljob env new`."""

from __future__ import annotations

from pathlib import Path

from rljob.local.reward_template import write_module

ENVIRONMENT = '''\
"""The environment {name}. Interface: docs/environments.md, "An environment of your own"."""

import random

from rljob.environments.environment_service import serve


class Environment:
    """Guess a number from 0 to 9; the answers tell whether the number is larger or smaller."""

    in_event_loop = True  # a step takes microseconds
    actions = [str(number) for number in range(10)]

    def reset(self, seed, row):
        """Start an episode. The samples of a group have the same row and different seeds."""
        self.number = random.Random(row["seed"]).randrange(10)
        return "Guess a number from 0 to 9.", {{}}

    def step(self, action):
        """Return observation, reward, terminated, truncated, info. The action may be any text."""
        guess = action.strip()
        if guess not in self.actions:
            return "That is no number from 0 to 9.", -0.1, False, False, {{"metrics": {{"success": 0.0}}}}
        if int(guess) == self.number:
            return "Right.", 1.0, True, False, {{"metrics": {{"success": 1.0}}}}
        hint = "larger" if int(guess) < self.number else "smaller"
        return f"The number is {{hint}}.", 0.0, False, False, {{"metrics": {{"success": 0.0}}}}


if __name__ == "__main__":
    serve(Environment)
'''
TEST = """\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from {name} import Environment


def test_hints_lead_to_the_number():
    environment = Environment()
    environment.reset(seed=0, row={{"seed": 3}})
    low, high, rewards = 0, 9, []
    while low <= high and 1.0 not in rewards:
        guess = (low + high) // 2
        text, reward, *_ = environment.step(str(guess))
        rewards.append(reward)
        low, high = (guess + 1, high) if "larger" in text else (low, guess - 1)
    assert rewards[-1] == 1.0 and len(rewards) <= 4


def test_a_text_that_is_no_number_costs_a_tenth():
    environment = Environment()
    environment.reset(seed=0, row={{"seed": 3}})
    assert environment.step("ten")[1] == -0.1
"""


def write_environment(name: str) -> Path:
    """Write the files of the environment ``name`` into a new folder of this name; return the folder.

    Raises:
        CliError: see :func:`rljob.local.reward_template.write_module`.
    """
    return write_module(name, {f"{name}.py": ENVIRONMENT, f"test_{name}.py": TEST})
