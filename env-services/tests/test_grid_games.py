"""FrozenLake and Sokoban: rules, texts, rewards, generation."""

import random

import pytest

from rljob.api.environments.kinds.ice import FrozenLakeOptions
from rljob.api.environments.kinds.warehouse import SokobanOptions
from rljob.environments import frozen_lake
from rljob.environments.frozen_lake import FrozenLake
from rljob.environments.grid_game import parse_action
from rljob.environments.sokoban import Sokoban


def lake(**options):
    return FrozenLake(FrozenLakeOptions(**options))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Left", "left"), (" up\n", "up"), ("D", "down"), ("r", "right"), ("<answer> Down </answer>", "down"),
        ("Up <answer>Left</answer> <answer>Up</answer>", "left"), ("", None), ("go left", None),
        ("<answer></answer>", None),
    ],
)  # fmt: skip
def test_an_action_is_read_from_the_text(text, action):
    assert parse_action(text) == action


def test_the_text_shows_the_grid_and_the_coordinates():
    game = lake(slippery=False)
    text, info = game.reset(0, {"seed": 3})
    *grid, places = text.split("\n")
    cells = [line.split(" ") for line in grid]
    assert [len(line) for line in cells] == [4] * 4 and info == {}
    (player,) = [(r, c) for r in range(4) for c in range(4) if cells[r][c] == "P"]
    (goal,) = [(r, c) for r in range(4) for c in range(4) if cells[r][c] == "G"]
    assert places == f"P {player[0]} {player[1]} G {goal[0]} {goal[1]}"
    compact = lake(slippery=False, separator="", coordinates=False)
    assert compact.reset(0, {"seed": 3})[0] == "\n".join("".join(line) for line in cells)


def test_the_row_decides_on_the_lake_and_the_seed_on_the_slips():
    assert lake().reset(1, {"seed": 5}) == lake().reset(2, {"seed": 5})
    assert len({lake().reset(1, {"seed": row})[0] for row in range(20)}) > 15

    def walk(seed):
        game = lake(frozen=1.0, size=8)
        game.reset(seed, {"seed": 5})
        return [game.step("left")[0] for _ in range(6)]

    assert walk(1) == walk(1) and len({tuple(walk(seed)) for seed in range(10)}) > 1


def test_a_step_slips_to_each_side_in_a_third_of_the_cases():
    found = {"intended": 0, "side": 0, "back": 0}
    for seed in range(300):
        game = lake(frozen=1.0, size=9)
        game.reset(seed, {"seed": 1})
        game._player = (4, 4)
        game.step("left")
        _, column = game._player
        found["intended" if column == 3 else "back" if column == 5 else "side"] += 1
    assert found["back"] == 0 and 75 < found["intended"] < 125 and found["side"] == 300 - found["intended"]


def test_the_expert_reaches_the_goal_and_holes_end_the_episode():
    options = {"slippery": False, "goal_reward": 1.2, "step_reward": -0.02, "invalid_reward": -0.1, "max_steps": 5}
    for row in range(50):
        game = lake(**options)
        game.reset(0, {"seed": row})
        distance = game._distances()[0][game._player]
        for step in range(1, distance + 1):
            text, reward, terminated, truncated, info = game.step(game.expert())
            assert terminated == (step == distance) and truncated == (step >= 5 and not terminated)
        assert reward == pytest.approx(1.18) and info["metrics"]["success"] and "√" in text
    game._player = next(iter(game._holes))
    assert game.failed() and "X" in game.text()
    game = lake(**options)
    game.reset(0, {"seed": 0})
    _, reward, *_, info = game.step("jump")
    assert reward == pytest.approx(-0.12)
    assert info["metrics"] == {"success": False, "action_is_valid": False, "action_is_effective": False}


@pytest.mark.parametrize("row", [{}, {"seed": "1"}, {"seed": True}])
def test_a_row_without_a_seed_is_an_error(row):
    with pytest.raises(ValueError, match="no column seed"):
        lake().reset(0, row)


def test_a_lake_without_ice_is_an_error(monkeypatch):
    monkeypatch.setattr(frozen_lake, "ATTEMPTS", 3)
    with pytest.raises(ValueError, match="raise frozen"):
        lake(frozen=1e-9, size=16).reset(0, {"seed": 0})


def sokoban(rows, **options):
    """Return a game in a given room."""
    game = Sokoban(SokobanOptions(size=len(rows), **options))
    cells = {(r, c): symbol for r, line in enumerate(rows) for c, symbol in enumerate(line)}
    game._walls = frozenset(cell for cell, symbol in cells.items() if symbol == "#")
    game._targets = frozenset(cell for cell, symbol in cells.items() if symbol in "O√S")
    game._boxes = frozenset(cell for cell, symbol in cells.items() if symbol in "X√")
    game._player = next(cell for cell, symbol in cells.items() if symbol in "PS")
    return game


def test_a_box_is_pushed_onto_its_target_and_off_it():
    game = sokoban(["######", "#P___#", "#_XO_#", "#____#", "#____#", "######"], boxes=1)
    game.step("down")
    text, reward, terminated, *_, info = game.step("right")
    assert (reward, terminated, info["metrics"]["success"]) == (pytest.approx(-0.1 + 1 + 10), True, True)
    assert text.split("\n")[2] == "# _ P √ _ #" and text.split("\n")[-1] == "P 2 2 X 2 3 O 2 3"
    _, reward, terminated, *_ = game.step("right")
    assert (reward, terminated) == (pytest.approx(-0.1 - 1), False) and "S" in game.text()


def test_walls_and_boxes_block_a_push():
    game = sokoban(["######", "#PX__#", "#X___#", "#X_OO#", "#___O#", "######"], boxes=3)
    before = game.text()
    for action in ("left", "up", "down"):
        *_, info = game.step(action)
        assert (game.text(), info["metrics"]["action_is_effective"]) == (before, False)
    assert game.step("right")[4]["metrics"]["action_is_effective"]


@pytest.mark.parametrize(("options", "rooms"), [({}, 20), ({"size": 8, "boxes": 2, "pulls": 4}, 4)])
def test_every_generated_room_can_be_solved(options, rooms):
    texts = set()
    for row in range(rooms):
        game = Sokoban(SokobanOptions(**options))
        texts.add(game.reset(0, {"seed": row})[0])
        assert len(game._boxes) == len(game._targets) and not game._boxes & game._targets
        for _ in range(60):
            action = game.expert()
            assert action is not None
            if game.step(action)[2]:
                break
        assert game.solved()
    assert len(texts) >= 0.9 * rooms


def test_a_room_without_a_solution_has_no_expert():
    assert sokoban(["######", "#X___#", "#_P_O#", "#____#", "#____#", "######"]).expert() is None


def test_generation_does_not_use_the_global_random_state():
    random.seed(1)
    first = Sokoban(SokobanOptions()).reset(0, {"seed": 9})
    random.seed(2)
    assert Sokoban(SokobanOptions()).reset(0, {"seed": 9}) == first
