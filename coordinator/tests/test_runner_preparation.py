"""Problems that prevent a start are reported before the run: --check and the start make the same checks."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from e2e.fakes.hub import serving_hub
from rljob.api.models import RLJob
from rljob.protocol.environment import ComponentEnvironment
from rljob.runner.data.readers import DataReaders
from rljob.runner.loops import load_loop
from rljob.runner.setup import check, prepare

ROWS = [{"question": f"{i} + 1 =", "answer": i + 1} for i in range(40)]


def write_model(directory: Path) -> None:
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"eos_token_id": 0}')


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A run directory with a model and a file of rows."""
    write_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def environment(storage: Path, task: dict | None = None, **spec: object) -> ComponentEnvironment:
    tasks = [{"name": "sums", "data": {"jsonl": {"path": "job://rows.jsonl"}}, "reward": "right"} | (task or {})]
    data = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": tasks,
        "rewards": [{"name": "right", "builtin": "exact_match"}],
        "rollouts": [{"name": "main"}],
        **spec,
    }
    job = RLJob.model_validate({"metadata": {"name": "test"}, "spec": data})
    return ComponentEnvironment(job, storage, "", "", "", "", "")


def test_a_valid_job_has_no_problems_and_nothing_is_written(storage: Path) -> None:
    assert check(environment(storage, evaluation={}), DataReaders(), will_initialize=False) == []
    assert sorted(path.name for path in storage.iterdir()) == ["model", "rows.jsonl"]


def test_a_model_of_the_hub_is_downloaded_when_the_runner_starts(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLJOB_MODEL_CACHE", str(storage / "cache"))
    remote = environment(storage, models=[{"name": "policy", "source": "hf://org/tiny"}])
    assert check(remote, DataReaders(), will_initialize=False) == []
    assert not (storage / "models.json").exists()
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add_directory("org/tiny", storage / "model")
        prepared = prepare(remote, DataReaders())
    assert prepared.codec.encode("1 + 1") == prepare(environment(storage), DataReaders()).codec.encode("1 + 1")


@pytest.mark.parametrize(
    ("task", "spec", "sentence"),
    [
        ({}, {"rollouts": [{"name": "main", "maxModelLength": 257}]}, ""),
        (
            {"sampling": {"maxTokens": 4}},
            {"rollouts": [{"name": "main", "maxModelLength": 8}]},
            "spec.tasks[0]: its first prompts have 8 to 9 tokens, and maxModelLength 8 leaves no room for an answer; ",
        ),
        (
            {"data": {"jsonl": {"path": "job://rows.jsonl", "heldOutFraction": 0}}},
            {"evaluation": {}},
            "spec.tasks[0].data.jsonl.path: no row of STORAGE/rows.jsonl is held out, and the evaluation needs some; n",
        ),
        ({"loop": "no_such.module:loop"}, {}, "spec.tasks[0].loop: module no_such.module cannot be imported ("),
        ({"loop": "json:loop"}, {}, "spec.tasks[0].loop: module json has no attribute loop; correct 'json:loop'"),
        ({"loop": "json:dumps"}, {}, "spec.tasks[0].loop: json:dumps is not an async function; define it as async def"),
        (
            {"messages": [{"role": "user", "content": "{question}"}]},
            {},
            "spec.models[0].source: STORAGE/model has no chat template (chat_template.jinja, or chat_template in token",
        ),
        (
            {"prompt": "{problem}"},
            {},
            "spec.tasks[0].data.jsonl.path: STORAGE/rows.jsonl, line 1: there is no column 'problem'; there are questi",
        ),
        (
            {},
            {"rewards": [{"name": "right", "builtin": "exact_match", "config": {"column": "solution"}}]},
            "spec.tasks[0].data.jsonl.path: STORAGE/rows.jsonl, line 1: reward right cannot score the row: there is no",
        ),
        (
            {"rewardColumn": "answer"},
            {},
            "spec.tasks[0].data.jsonl.path: STORAGE/rows.jsonl, line 1: column 'answer' names the reward ",
        ),
        (
            {"moreRewards": [{"name": "more"}]},
            {
                "rewards": [
                    {"name": "right", "builtin": "exact_match"},
                    {"name": "more", "builtin": "exact_match", "config": {"column": "solution"}},
                ]
            },
            "spec.tasks[0].data.jsonl.path: STORAGE/rows.jsonl, line 1: reward more cannot score the row: there is no",
        ),
        (
            {},
            {"models": [{"name": "policy", "source": "job://other"}]},
            "spec.models[0].source: STORAGE/other/tokenizer.json does not exist; the policy needs a tokenizer.json bes",
        ),
    ],
)
def test_each_problem_begins_with_its_field(storage: Path, task: dict, spec: dict, sentence: str) -> None:
    found = check(environment(storage, task, **spec), DataReaders(), will_initialize=False)
    assert len(found) == bool(sentence)
    assert "".join(found).startswith(sentence.replace("STORAGE", str(storage)))


PACKAGE = """
from rljob.api.base import Model
from rljob.api.rewards import RewardKind

class Options(Model):
    column: str = "answer"

def row_check(row, options):
    if len(str(row[options.column])) > 1:
        raise ValueError(f"{row[options.column]} has more than one digit")

KIND = RewardKind(make="a_library_of_the_service:make", options=Options, row_check=row_check)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_rewards.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_rewards", None)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ({}, ""),
        (
            {"config": {"column": "number"}},
            "spec.tasks[0].data.jsonl.path: STORAGE/rows.jsonl, line 2: reward right c",
        ),
        (
            {"config": {"column": "none"}},
            "spec.tasks[0].data.jsonl.path: STORAGE/rows.jsonl, line 1: the row check o",
        ),
        ({"config": {"colum": "a"}}, "spec.rewards[0].config.colum: unknown field; did you mean column?"),
        ({"function": "own_rewards:none"}, "spec.rewards[0].function: module own_rewards has no attribute none"),
    ],
)
def test_rows_are_checked_by_the_reward_of_a_user_s_own_package(
    storage: Path, package: None, reward: dict, sentence: str
) -> None:
    rows = [{"question": "1 + 1 =", "answer": "2", "number": number} for number in (1, 12, *range(8))]
    (storage / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [{"name": "right", "function": "own_rewards:KIND"} | reward]
    found = check(environment(storage, rewards=rewards), DataReaders(), will_initialize=False)
    assert len(found) == bool(sentence)
    assert "".join(found).startswith(sentence.replace("STORAGE", str(storage)))


class Generated:
    """A source without end."""

    def problem(self, split: str, row: int) -> dict:
        """Return a row."""
        return {"question": f"{row} + 1 =", "answer": "1"}

    def size(self, split: str) -> None:
        """Rows are endless."""


def test_generated_problems_are_checked_by_their_reward_too(storage: Path, package: None) -> None:
    rewards = [{"name": "right", "function": "own_rewards:KIND", "config": {"column": "question"}}]
    task = {"data": {"reasoningGym": {"dataset": "chain_sum"}}}
    readers = DataReaders(reasoning_gym=lambda data, seed, where: Generated())
    (found,) = check(environment(storage, task, rewards=rewards), readers, will_initialize=False)
    assert re.match(r"spec.tasks\[0\]: reward right cannot score the row: .* has more than one digit", found)


def test_a_runner_without_the_package_of_a_reward_starts_and_does_not_check_rows(
    storage: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a cluster only the image of the reward service needs the package."""
    rewards = [{"name": "right", "function": "not_installed_here:KIND"}]
    prepare(environment(storage, rewards=rewards), DataReaders())
    assert "rows are not checked by reward right: spec.rewards[0].function: module not_installed_here" in caplog.text


def test_a_stop_string_with_a_special_token_is_refused(storage: Path) -> None:
    path = storage / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path))
    stops = {"sampling": {"stop": ["end", "a<end>"]}}
    (problem,) = check(environment(storage, stops), DataReaders(), will_initialize=False)
    assert problem.startswith("spec.tasks[0].sampling.stop[1]: 'a<end>' contains the special token '<end>', which the")


def test_all_tasks_and_the_model_are_checked_even_if_one_is_invalid(storage: Path) -> None:
    (storage / "model" / "config.json").write_text("{}")
    tasks = [{"name": name, "data": {"jsonl": {"path": f"job://{name}"}}, "reward": "right"} for name in ("one", "two")]
    found = check(environment(storage, tasks=tasks), DataReaders(), will_initialize=False)
    assert [line.partition(": ")[0] for line in found] == [
        "spec.models[0].source",
        "spec.tasks[0].data.jsonl.path",
        "spec.tasks[1].data.jsonl.path",
    ]


def test_a_chat_template_that_rejects_the_first_prompts_is_reported(storage: Path) -> None:
    (storage / "model" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    messages = {"messages": [{"role": "user", "content": "{question}"}]}
    assert check(environment(storage, messages), DataReaders(), will_initialize=False) == [
        "spec.tasks[0]: the model's chat template refuses the messages: no"
    ]


def test_files_that_the_initializer_makes_are_not_checked(tmp_path: Path) -> None:
    nothing_there = environment(tmp_path)
    assert check(nothing_there, DataReaders(), will_initialize=True) == []
    assert len(check(nothing_there, DataReaders(), will_initialize=False)) == 2


def test_a_start_records_the_data_and_a_later_start_with_changed_data_is_refused(storage: Path) -> None:
    prepare(environment(storage), DataReaders())
    prepare(environment(storage), DataReaders())
    (storage / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    sentence = (
        f"spec.tasks[0].data.jsonl.path: {storage}/rows.jsonl has changed since this run began; put the file back"
    )
    with pytest.raises(ValueError) as refused:
        prepare(environment(storage), DataReaders())
    assert str(refused.value).startswith(sentence)
    assert check(environment(storage), DataReaders(), will_initialize=False) == [str(refused.value)]


def run_check(job: ComponentEnvironment, storage: Path | None) -> subprocess.CompletedProcess[str]:
    path = job.storage / "job.json"
    path.write_text(job.job.model_dump_json(by_alias=True))
    variables = {"RLJOB_JOB": str(path)} | ({"RLJOB_STORAGE": str(storage)} if storage else {})
    program = (
        "import sys; sys.argv = ['main', '--check']\n"
        "from rljob.runner.main import main\n"
        "try: main()\n"
        "finally: print([m for m in ('reasoning_gym', 'pyarrow', 'aiohttp', 'torch') if m in sys.modules])"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={key: value for key, value in os.environ.items() if not key.startswith("RLJOB_")}
        | variables
        | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )


def test_the_check_prints_one_problem_per_line_exits_with_2_and_imports_only_what_it_needs(storage: Path) -> None:
    done = run_check(environment(storage, {"prompt": "{problem}"}), storage)
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
    assert done.stderr.count("\n") == 1 and "there is no column 'problem'" in done.stderr


def test_the_check_of_a_job_without_storage_checks_files_outside_the_storage(storage: Path) -> None:
    done = run_check(environment(storage, {"data": {"jsonl": {"path": str(storage / "rows.jsonl")}}}), None)
    assert (done.returncode, done.stderr) == (0, "")
    done = run_check(environment(storage, {"data": {"jsonl": {"path": str(storage / "none.jsonl")}}}), None)
    assert done.returncode == 2 and "there is no file" in done.stderr


class Configured:
    """A loop with options of its own."""

    async def __call__(self, context: object) -> None:
        """Do nothing."""


async def no_argument() -> None:
    """Do nothing."""


async def one_argument(context: object) -> None:
    """Do nothing."""


def not_async(context: object) -> None:
    """Do nothing."""


@pytest.fixture
def user_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a user."""
    loops = {"ok": one_argument, "partial": functools.partial(one_argument), "callable": Configured()}
    others = {"none": None, "cls": Configured, "no_argument": no_argument, "not_async": not_async}
    monkeypatch.setitem(sys.modules, "user_package", types.SimpleNamespace(**loops, **others))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ok", "partial", "callable"])
def test_an_async_callable_is_a_loop(user_package: None, name: str) -> None:
    work = load_loop(f"user_package:{name}", "loop")(None)  # type: ignore[arg-type]
    assert asyncio.iscoroutine(work)
    work.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "is not an async function"),
        ("cls", "is not an async function"),
        ("not_async", "is not an async function"),
        ("no_argument", "does not take one argument"),
    ],
)
def test_a_loop_must_be_an_async_function_of_one_argument(user_package: None, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^spec.tasks\[0\].loop: user_package:{name} {reason}"):
        load_loop(f"user_package:{name}", "spec.tasks[0].loop")
