"""The registry of rewards, and rewards of a user's own package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob.api.base import Model
from rljob.api.cel_rules import rules
from rljob.api.errors import ManifestError
from rljob.api.explain import fields, manifest_page
from rljob.api.field_docs import field_docs
from rljob.api.load import validate
from rljob.api.rewards import REWARDS, RewardKind
from rljob.api.rewards.load_reward import load_reward
from rljob.api.tasks import SOURCES

PACKAGE = """
from rljob.api.base import Model
from rljob.api.rewards import Regex, RewardKind
from pydantic import field_validator

def plain(completion):
    return 1.0

class Options(Model):
    column: str
    unit: int = 1
    strip: Regex | None = None

    @field_validator("unit")
    @classmethod
    def positive(cls, unit):
        if unit < 1:
            raise ValueError("must be at least 1; raise it")
        return unit

def row_check(row, options):
    if row[options.column] == "":
        raise ValueError(f"column {options.column} is empty")

def make(options, tasks):
    if options.unit == 99:
        raise RuntimeError("99 cannot be made")
    if options.unit == 98:
        raise SystemExit("98 cannot be made")
    return lambda completion: len(completion) / options.unit

KIND = RewardKind(make=make, options=Options, data=["jsonl"], row_check=row_check)
LAZY = RewardKind(make="no_such_library:make", row_check="own_rewards:row_check")
number = 5
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_rewards.py").write_text(PACKAGE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("own_rewards", "broken_rewards"):
        sys.modules.pop(name, None)


def manifest(reward: dict, data: dict | None = None) -> dict:
    task = {"name": "sums", "data": data or {"jsonl": {"path": "sums.jsonl"}}, "reward": "right"}
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [task],
        "rewards": [{"name": "right"} | reward],
        "rollouts": [{"name": "main"}],
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "test"}, "spec": spec}


def loaded(reward: dict, data: dict | None = None):
    return load_reward(validate(manifest(reward, data)).spec, 0)


def problems(reward: dict, data: dict | None = None) -> list[str]:
    with pytest.raises(ValueError) as refused:
        loaded(reward, data)
    return str(refused.value).splitlines()


# --- the registry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REWARDS)
def test_a_built_in_reward_is_complete(name: str) -> None:
    kind = REWARDS[name]
    assert kind.summary and kind.summary.endswith(".")
    assert isinstance(kind.make, str), "the factory is imported by the reward service only"
    assert kind.row_check is None or callable(kind.row_check)
    docs = field_docs(kind.options)
    assert set(docs) == set(kind.options.model_fields)
    row = next(line for line in manifest_page().splitlines() if line.startswith("| `spec.rewards.builtin`"))
    assert f"`{name}`: {kind.summary}" in row
    for option, field in kind.options.model_fields.items():
        assert f"`{field.alias or option}` ({' '.join(docs[option].split())}" in fields()["spec.rewards.config"].meaning


@pytest.mark.parametrize("name", [name for name, kind in REWARDS.items() if kind.data is not None])
def test_cel_and_python_refuse_data_that_a_built_in_reward_does_not_score(name: str) -> None:
    kind = REWARDS[name]
    assert any(f"reward.builtin == '{name}'" in rule.rule for rule in rules())
    other = next(source for source in ("jsonl", "reasoningGym") if not kind.accepts([source]))
    data = {"jsonl": {"path": "a"}} if other == "jsonl" else {"reasoningGym": {"dataset": "chain_sum"}}
    with pytest.raises(ManifestError, match=rf"spec.tasks\[0\].reward: .* which scores {kind.accepted} data only"):
        validate(manifest({"builtin": name}, data))


def test_a_misspelt_name_is_refused_with_the_names() -> None:
    with pytest.raises(ManifestError) as refused:
        validate(manifest({"builtin": "exact_mach"}))
    names = " or ".join(map(repr, REWARDS))
    assert str(refused.value) == (
        f"spec.rewards[0].builtin: must be {names}, not 'exact_mach'; did you mean exact_match?"
    )


def test_the_registry_needs_no_library_of_a_reward() -> None:
    heavy = ("reasoning_gym", "rljob.rewards", "fastapi", "torch")
    program = f"import sys, rljob.api.rewards.load_reward; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


# --- rewards of a user's own package ----------------------------------------------------------------------------------


def test_a_function_is_a_reward_without_options(package: None) -> None:
    reward = loaded({"function": "own_rewards:plain"})
    assert reward.make_scorer()(completion="x") == 1.0
    assert reward.plain_function is not None and reward.row_check() is None


def test_a_reward_kind_has_options_and_checks_rows(package: None) -> None:
    reward = loaded({"function": "own_rewards:KIND", "config": {"column": "text", "unit": 4}})
    assert reward.make_scorer()(completion="12") == 0.5
    reward.row_check()({"text": "a"})
    with pytest.raises(ValueError, match=r"^reward right cannot score the row: column text is empty$"):
        reward.row_check()({"text": ""})
    with pytest.raises(ValueError, match="the row check of reward right raised KeyError: 'text'; raise ValueError"):
        reward.row_check()({})


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"function": "no_rewards:plain"}, ["function: module no_rewards cannot be imported (ModuleNotFoundError"]),
        ({"function": "broken_rewards:plain"}, ["function: module broken_rewards cannot be imported (ZeroDivisionErr"]),
        ({"function": "own_rewards:none"}, ["function: module own_rewards has no attribute none; correct"]),
        ({"function": "own_rewards:number"}, ["function: own_rewards:number is of type int; name a function, a cl"]),
        ({"function": "own_rewards:Options"}, ["function: own_rewards:Options is a class; name a function, a"]),
        ({"function": "own_rewards:plain", "config": {"a": 1}}, ["config: own_rewards:plain is a function, which has"]),
        (
            {"function": "own_rewards:KIND", "config": {"colum": "a", "unit": 0, "strip": "("}},
            [
                "config.column: required; add it",
                "config.unit: must be at least 1; raise it",
                "config.strip: '(' is not a regular expression: missing ), unterminated subpattern",
                "config.colum: unknown field; did you mean column?",
            ],
        ),
        ({"function": "own_rewards:KIND", "config": {"column": 5}}, ["config.column: must be text, not 5"]),
    ],
)
def test_a_problem_of_a_function_is_a_sentence_with_its_field(package: None, reward: dict, expected: list[str]) -> None:
    found = problems(reward)
    assert len(found) == len(expected)
    for sentence, beginning in zip(found, expected, strict=True):
        assert sentence.startswith(f"spec.rewards[0].{beginning}")


def test_data_that_a_function_does_not_score_are_refused(package: None) -> None:
    reward = {"function": "own_rewards:KIND", "config": {"column": "a"}}
    assert problems(reward, {"reasoningGym": {"dataset": "chain_sum"}}) == [
        "spec.rewards[0].function: own_rewards:KIND scores jsonl data only, and the data of task sums are "
        "reasoningGym; use another reward for the task"
    ]


def test_a_factory_is_imported_when_the_scorer_is_made(package: None) -> None:
    reward = loaded({"function": "own_rewards:LAZY"})
    assert reward.row_check() is not None
    with pytest.raises(ValueError, match=r"spec.rewards\[0\].function: module no_such_library cannot be imported"):
        reward.make_scorer()


@pytest.mark.parametrize(("unit", "raised"), [(99, "RuntimeError"), (98, "SystemExit")])
def test_a_factory_that_raises_is_reported_with_the_field(package: None, unit: int, raised: str) -> None:
    reward = loaded({"function": "own_rewards:KIND", "config": {"column": "a", "unit": unit}})
    sentence = rf"spec.rewards\[0\].function: the reward cannot be made \({raised}: {unit}"
    with pytest.raises(ValueError, match=sentence):
        reward.make_scorer()


def test_a_kind_with_an_unknown_source_of_data_is_refused() -> None:
    with pytest.raises(ValueError, match=f"contains 'json'; sources are {', '.join(SOURCES)}"):
        RewardKind(make="a:b", options=Model, data=["json"])


def test_a_reward_served_by_a_user_s_program_is_not_loaded() -> None:
    assert loaded({"url": "http://a"}) is None and loaded({"local": {"command": ["a"]}}) is None


@pytest.mark.parametrize("options", [dict, {"unit": 1}])
def test_options_that_are_not_a_model_are_refused(options) -> None:
    with pytest.raises(ValueError, match=r"^options of a RewardKind is .*; name a subclass of rljob.api.base.Model"):
        RewardKind(make="a:b", options=options)


# --- rewards of a task ------------------------------------------------------------------------------------------------


def routed(task: dict, *rewards: dict) -> dict:
    body = manifest({"builtin": "exact_match"})
    body["spec"]["tasks"][0] |= task
    body["spec"]["rewards"] += rewards
    return body


GYM = {"name": "gym", "builtin": "reasoning_gym"}
FAR = {"name": "far", "builtin": "exact_match"}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["gone"], "moreRewards[0].name: 'gone' is not defined; there are right, gym, far; name one of them"),
        (["right"], "moreRewards[0].name: 'right' is named twice for the task; name it once"),
        (["far", "far"], "moreRewards[1].name: 'far' is named twice for the task; name it once"),
        (["gym"], "moreRewards[0].name: 'gym' is the builtin reasoning_gym, which scores reasoningGym data only; use"),
    ],
)
def test_a_further_reward_that_cannot_be_used_is_refused(more: list[str], problem: str) -> None:
    with pytest.raises(ManifestError) as refused:
        validate(routed({"moreRewards": [{"name": name} for name in more]}, GYM, FAR))
    assert f"spec.tasks[0].{problem}" in str(refused.value)


def test_a_reward_is_made_for_the_tasks_whose_rows_may_name_it() -> None:
    spec = validate(routed({"rewardColumn": "by"}, GYM, FAR)).spec
    tasks = {spec.rewards[i].name: [task.name for task in load_reward(spec, i).tasks] for i in range(3)}
    assert tasks == {"right": ["sums"], "gym": [], "far": ["sums"]}
    spec = validate(routed({"moreRewards": [{"name": "far"}]}, GYM, FAR)).spec
    assert [len(load_reward(spec, i).tasks) for i in range(3)] == [1, 0, 1]
