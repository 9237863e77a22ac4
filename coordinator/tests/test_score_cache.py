"""The cache of a reward's scores."""

from __future__ import annotations

import pytest

from rljob.protocol.score_messages import Score, ScoreItem, ScoreTurn
from rljob.runner import score_cache
from rljob.runner.score_cache import ScoreCache


def item(sample: str = "g0.0", **changes: object) -> ScoreItem:
    fields = {"task": "sums", "prompt": "1+1=", "completion": "2", "finish": "stop", "problem": {"a": 1, "b": 2}}
    return ScoreItem(sample, **(fields | changes))


def test_a_sample_with_the_same_content_has_the_same_score_under_its_own_name() -> None:
    cache = ScoreCache()
    assert cache.get(item()) is None
    cache.put(item(), Score("g0.0", 0.5, {"x": 1.0}, "", [0.5]))
    assert cache.get(item("g0.1", problem={"b": 2, "a": 1})) == Score("g0.1", 0.5, {"x": 1.0}, "", [0.5])


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "more"},
        {"prompt": "1+1 ="},
        {"completion": "2 "},
        {"finish": "length"},
        {"problem": {"a": 1, "b": 2.5}},
        {"turns": [ScoreTurn("model", "2")]},
        {"response_tokens": 1},
        {"response_token_ids": [1]},
        {"metadata": {"split": "heldOut"}},
    ],
)
def test_every_field_that_a_reward_sees_counts(changes: dict[str, object]) -> None:
    cache = ScoreCache()
    cache.put(item(), Score("g0.0", 1.0))
    assert cache.get(item(**changes)) is None


def test_errors_and_long_scores_are_not_kept() -> None:
    cache = ScoreCache()
    cache.put(item(), Score("g0.0", 0.0, {}, "took too long"))
    cache.put(item(), Score("g0.0", 0.0, {str(i): 1.0 for i in range(65)}))
    assert cache.get(item()) is None


def test_the_scores_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_cache, "ENTRIES", 2)
    cache = ScoreCache()
    for text in "ab":
        cache.put(item(completion=text), Score("s", 1.0))
    assert cache.get(item(completion="a")) is not None
    cache.put(item(completion="c"), Score("s", 1.0))
    assert [cache.get(item(completion=text)) is not None for text in "abc"] == [True, False, True]


def test_a_sample_that_cannot_be_encoded_has_no_score() -> None:
    cache = ScoreCache()
    cache.put(item(), Score("g0.0", 1.0))
    assert cache.get(item(completion="\ud800")) is None
