"""Rows of reasoning-gym tasks are the same on every runner and at every start."""

import msgspec
import pytest

from rljob.api.tasks import ReasoningGym
from rljob.protocol.data import is_held_out
from rljob.runner.data.reasoning_gym_source import ReasoningGymSource

SUMS = ReasoningGym(dataset="chain_sum", config={"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 3})
WHERE = "tasks[0].data.reasoningGym"


def questions(source: ReasoningGymSource, split: str, rows: int) -> list[str]:
    return [source.problem(split, row)["question"] for row in range(rows)]


def test_a_row_does_not_depend_on_the_source_or_on_earlier_reads() -> None:
    source = ReasoningGymSource(SUMS, 7, WHERE)
    assert questions(source, "train", 20) == questions(ReasoningGymSource(SUMS, 7, WHERE), "train", 20)
    assert source.problem("train", 3) == ReasoningGymSource(SUMS, 7, WHERE).problem("train", 3)


def test_splits_never_share_a_question() -> None:
    source = ReasoningGymSource(SUMS, 7, WHERE)
    assert not any(map(is_held_out, questions(source, "train", 200)))
    assert all(map(is_held_out, questions(source, "heldOut", 50)))


def test_another_seed_gives_other_rows_not_the_same_ones_shifted() -> None:
    first, second = (set(questions(ReasoningGymSource(SUMS, seed, WHERE), "train", 100)) for seed in (1, 2))
    assert len(first & second) < 5


def test_rows_are_endless() -> None:
    source = ReasoningGymSource(SUMS, 7, WHERE)
    assert "question" in source.problem("train", 2**40)


@pytest.mark.parametrize("dataset", ["acre", "gsm_symbolic", "list_functions", "word_ladder"])
def test_datasets_that_make_all_items_at_creation_have_different_rows_too(dataset: str) -> None:
    source = ReasoningGymSource(ReasoningGym(dataset=dataset), 7, WHERE)
    assert len(set(questions(source, "train", 6))) >= 5
    assert questions(source, "train", 2) == questions(source, "train", 2)


def test_a_problem_is_plain_json() -> None:
    problem = ReasoningGymSource(ReasoningGym(dataset="knights_knaves"), 7, WHERE).problem("train", 0)
    assert msgspec.json.decode(msgspec.json.encode(problem))["metadata"]["names"] == problem["metadata"]["names"]


def test_an_unknown_dataset_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ValueError, match=r"tasks\[0\].*no dataset 'chain_sums'.*did you mean 'chain_sum'"):
        ReasoningGymSource(ReasoningGym(dataset="chain_sums"), 7, WHERE)


@pytest.mark.parametrize("config", [{"min_terms": 0}, {"terms": 3}])
def test_a_config_that_the_dataset_refuses_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tasks\[0\].data.reasoningGym.config: chain_sum refuses it"):
        ReasoningGymSource(ReasoningGym(dataset="chain_sum", config=config), 7, WHERE)


def test_a_dataset_without_questions_for_a_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob.runner.data.reasoning_gym_source.is_held_out", lambda question: False)
    with pytest.raises(ValueError, match=r"tasks\[0\].*too few different questions"):
        ReasoningGymSource(SUMS, 7, WHERE).problem("heldOut", 0)
