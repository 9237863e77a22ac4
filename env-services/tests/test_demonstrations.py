"""Episodes of a scripted agent, which the trainer's image plays without the packages of the service."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from rljob.api.environments.kinds.ice import FrozenLakeOptions
from rljob.environments.demonstrations import demonstrate
from rljob.environments.frozen_lake import FrozenLake

SERVICE = ("fastapi", "starlette", "prometheus_client", "uvicorn", "uvloop")


class Slow:
    """An async environment that ends after three steps."""

    actions = ("a", "b")
    steps = 0

    async def reset(self, seed, row):
        return f"{seed} {row['seed']}", {}

    async def step(self, action):
        self.steps += 1
        return str(self.steps), 0.0, self.steps == 3, False, {}


def test_the_expert_solves_a_lake_and_a_random_agent_names_actions():
    lake = lambda: FrozenLake(FrozenLakeOptions(slippery=False))  # noqa: E731
    played = asyncio.run(demonstrate(lake, 20, True, 7))
    assert 1 <= len(played) < 20
    again = FrozenLake(FrozenLakeOptions(slippery=False))
    texts = [again.reset(7, {"seed": (1 << 53) + 7})[0]]
    ends = []
    for _, action in played:
        text, _, terminated, _, info = again.step(action)
        texts.append(text)
        ends.append(terminated)
    assert [text for text, _ in played] == texts[:-1] and ends == [False] * (len(ends) - 1) + [True]
    assert info["metrics"]["success"]
    assert {action for _, action in asyncio.run(demonstrate(lake, 20, False, 7))} <= set(FrozenLake.actions)


def test_an_async_environment_is_played_too():
    assert [text for text, _ in asyncio.run(demonstrate(Slow, 9, False, 1))] == ["1 " + str((1 << 53) + 1), "1", "2"]
    assert len(asyncio.run(demonstrate(Slow, 2, False, 1))) == 2


def test_the_module_and_the_built_in_games_need_no_package_of_the_service():
    program = (
        f"import sys\nfor name in {SERVICE!r}: sys.modules[name] = None\n"
        "import rljob.environments.demonstrations, rljob.environments.frozen_lake, rljob.environments.sokoban"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
