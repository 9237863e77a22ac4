"""The reward `reward_model` with a tiny model. It imports torch and transformers, which takes seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rljob.api.extensions import load
from rljob.api.rewards import REWARDS
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.pool import Pool

thorough = pytest.mark.skipif(not os.environ.get("RLJOB_THOROUGH"), reason="imports torch; set RLJOB_THOROUGH=1")
TEMPLATE = "{% for message in messages %}{{ message.role[0] }} {{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two labels with random weights, whose words are the numbers from 0 to 99."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

    path = tmp_path_factory.mktemp("model")
    words = {str(i): i for i in range(100)} | {"u": 100, "a": 101, "?": 102, "end": 103}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end", unk_token="?")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(path)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=104, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_labels=2,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(path)
    return path


def scorer(directory: Path, **config: Any):
    options = REWARDS["reward_model"].parse({"model": str(directory)} | config)
    return load({}, REWARDS["reward_model"].make, "")(options, [])


def logits(model: Path, text: str) -> list[float]:
    """Return the outputs for one sample without padding."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    found = AutoModelForSequenceClassification.from_pretrained(model)
    found.config.pad_token_id = 103
    with torch.inference_mode():
        return found(input_ids=torch.tensor([ids])).logits[0].tolist()


@thorough
def test_the_reward_is_an_output_of_the_model_whatever_is_in_the_batch(model: Path) -> None:
    reward = scorer(model)
    found = reward(prompt=["1 2", "3"], completion=["4 5 6 7", "8"], problem=[{}, {}])
    assert found[0] == (pytest.approx(logits(model, "u 1 2 a 4 5 6 7")[0], abs=1e-5), {"tokens": 8.0})
    assert found[1] == (pytest.approx(logits(model, "u 3 a 8")[0], abs=1e-5), {"tokens": 4.0})


@thorough
def test_format_column_label_and_activation(model: Path) -> None:
    import math

    reward = scorer(model, format="text", column="question", label=1, activation="softmax")
    (value, _), = reward(prompt=["1"], completion=[" 4"], problem=[{"question": "9 9"}])  # fmt: skip
    first, second = map(math.exp, logits(model, "9 9 4"))
    assert value == pytest.approx(second / (first + second), abs=1e-5)
    (value, _), = scorer(model, activation="sigmoid")(prompt=["1"], completion=["4"], problem=[{}])  # fmt: skip
    assert value == pytest.approx(1 / (1 + math.exp(-logits(model, "u 1 a 4")[0])), abs=1e-5)


@thorough
async def test_workers_share_the_model_and_a_long_sample_is_not_scored(model: Path) -> None:
    evaluator = RewardEvaluator(scorer(model, maxTokens=5), "mine")
    items = [ScoreItem(f"s{i}", "sums", "1", "4 " * (1 + i % 3), "stop", {}) for i in range(12)]
    async with Pool(evaluator, "mine", 2, 60.0) as pool:
        found: list[Score] = await pool.score(items)
    values = [logits(model, "u 1 a" + " 4" * count)[0] for count in (1, 2)]
    assert [score.reward for score in found if not score.error] == pytest.approx(values * 4, abs=1e-5)
    assert {score.error for score in found[2::3]} == {
        "reward mine did not score the sample: the sample has 6 tokens, and maxTokens is 5"
    }


@thorough
@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"label": 2}, "label 2: the model has 2 labels; lower it"),
        ({"model": "/nowhere"}, "model /nowhere is no directory of a model: it lacks config.json; correct it"),
    ],
)
def test_a_model_that_cannot_be_used_is_an_error_at_the_start(model: Path, config: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        scorer(model, **config)
