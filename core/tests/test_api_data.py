"""Data, prompts and rewards of a manifest: templates, options of builtins, paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.api.resolve import with_absolute_paths
from rljob.api.rewards import REWARDS
from rljob.api.rewards.kinds.exact_match import ExactMatchOptions
from rljob.api.templates import columns_of, fill


def manifest(task=None, reward=None):
    task = {"name": "sums", "data": {"jsonl": {"path": "sums.jsonl"}}, "reward": "right"} | (task or {})
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [task],
        "rewards": [{"name": "right"} | (reward or {"builtin": "exact_match"})],
        "rollouts": [{"name": "main"}],
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "test"}, "spec": spec}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"regex": "a"}, "config.regex: unknown field; there are column, extract and ignoreCase"),
        ({"ignore_case": True}, "config.ignore_case: unknown field; did you mean ignoreCase?"),
        ({"column": 5}, "config.column: must be text, not 5"),
        ({"ignoreCase": "yes"}, "config.ignoreCase: must be true or false, not 'yes'"),
        ({"extract": "(a"}, "config.extract: '(a' is not a regular expression: missing ), unterminated subpattern"),
        (
            {"extract": "a{99999999999}"},
            "config.extract: 'a{99999999999}' is not a regular expression: the repetition number is too large",
        ),
    ],
)
def test_an_invalid_option_of_exact_match_is_refused_with_its_path(config, sentence):
    with pytest.raises(ManifestError) as refused:
        validate(manifest(reward={"builtin": "exact_match", "config": config}))
    (found,) = refused.value.problems
    assert found.startswith(f"spec.rewards[0].{sentence}")


def test_an_expression_with_too_many_groups_is_refused():
    with pytest.raises(
        ManifestError, match="is not a regular expression: its groups are nested too deeply; correct it"
    ):
        validate(manifest(reward={"builtin": "exact_match", "config": {"extract": "(" * 3000}}))


def test_reasoning_gym_has_no_options_and_scores_its_own_data_only():
    with pytest.raises(ManifestError) as refused:
        validate(manifest(reward={"builtin": "reasoning_gym", "config": {"column": "a"}}))
    assert refused.value.problems == [
        "spec.tasks[0].reward: 'right' is the builtin reasoning_gym, which scores reasoningGym data only; "
        "use another reward",
        "spec.rewards[0].config.column: unknown field; remove it",
    ]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            {"messages": [{"role": "user", "content": "{q}"}, {"role": "assistant", "content": "Well,"}]},
            "spec.tasks[0].messages: the last message is the assistant's; end with the message that the model answers",
        ),
        (
            {"data": {"reasoningGym": {"dataset": "chain_sum"}, "columns": {"q": "question"}}},
            "spec.tasks[0].data.columns: problems of reasoningGym always have question, answer and metadata; remove it",
        ),
    ],
)
def test_an_invalid_task_is_refused_with_the_path_of_its_field(task, sentence):
    with pytest.raises(ManifestError) as refused:
        validate(manifest(task))
    assert refused.value.problems == [sentence]


def test_omitted_options_have_their_defaults():
    parse = REWARDS["exact_match"].parse
    assert parse({}) == ExactMatchOptions(column="answer", extract=None, ignore_case=False)
    options = parse({"column": "x", "extract": "(a)", "ignoreCase": True})
    assert (options.column, options.extract.pattern, options.ignore_case) == ("x", "(a)", True)


def test_relative_paths_of_models_and_data_become_absolute_and_storage_paths_do_not_change():
    data = manifest({"data": {"parquet": {"path": "a/b.parquet", "heldOutPath": "job://held.parquet"}}})
    data["spec"]["models"][0]["source"] = "models/x"
    data["spec"]["tasks"] += [{**data["spec"]["tasks"][0], "name": "t", "data": {"datasets": {"path": "/d"}}}]
    job = validate(data)
    spec = with_absolute_paths(job, Path("/base")).spec
    assert spec.models[0].source == "/base/models/x"
    assert spec.tasks[0].data.parquet.path == "/base/a/b.parquet"
    assert spec.tasks[0].data.parquet.held_out_path == "job://held.parquet"
    assert spec.tasks[1].data.datasets.path == "/d"
    assert job.spec.models[0].source == "models/x"


def test_a_template_is_filled_with_text_and_numbers_and_keeps_doubled_braces():
    assert fill("{a} + {b} = {{?}}\n", {"a": 1, "b": "{x}"}) == "1 + {x} = {?}\n"
    assert columns_of("{a} {{b}} {c}") == {"a", "c"}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"b": 1, "c": 2}, "there is no column 'a'; there are b, c; name one of them, or rename one with columns"),
        ({"a": None}, "column 'a' holds null; it must hold text or a number"),
        ({"a": [1]}, "column 'a' holds a list; it must hold text or a number"),
        ({"a": {}}, "column 'a' holds a mapping; it must hold text or a number"),
    ],
)
def test_a_row_that_does_not_fit_a_template_is_an_error_with_the_column(row, sentence):
    with pytest.raises(ValueError) as caught:
        fill("{a}", row)
    assert str(caught.value) == sentence
