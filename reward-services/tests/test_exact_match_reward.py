from __future__ import annotations

import pytest

from rljob.api.rewards import REWARDS
from rljob.rewards.exact_match_reward import ExactMatchReward

parse = REWARDS["exact_match"].parse


@pytest.mark.parametrize(
    ("config", "completion", "problem", "expected"),
    [
        ({}, " Paris\n", {"answer": "Paris"}, (1.0, 1.0)),
        ({}, "paris", {"answer": "Paris"}, (0.0, 1.0)),
        ({"ignoreCase": True}, "paris", {"answer": "Paris"}, (1.0, 1.0)),
        ({}, "42", {"answer": 42}, (1.0, 1.0)),
        ({"column": "city"}, "Rome", {"answer": "Paris", "city": "Rome"}, (1.0, 1.0)),
        ({"extract": r"#### *(-?\d+)"}, "7? No: #### 6", {"answer": "6"}, (1.0, 1.0)),
        ({"extract": r"\d+"}, "3 + 4 = 7", {"answer": "7"}, (1.0, 1.0)),
        ({"extract": r"\d+"}, "seven", {"answer": "7"}, (0.0, 0.0)),
        ({"extract": r"(a)|b"}, "b", {"answer": "b"}, (0.0, 0.0)),
        ({"extract": r"<answer>(.*?)</answer>"}, "<answer>1</answer><answer> 2 </answer>", {"answer": "2"}, (1.0, 1.0)),
    ],
)
def test_the_last_answer_is_compared_with_the_column(config, completion, problem, expected):
    score, metrics = ExactMatchReward(parse(config), [])(completion=completion, problem=problem)
    assert (score, metrics["answered"]) == expected


def test_the_error_of_a_missing_column_lists_the_columns():
    with pytest.raises(ValueError, match="there is no column 'answer'; there are question"):
        ExactMatchReward(parse({}), [])(completion="", problem={"question": "?"})
