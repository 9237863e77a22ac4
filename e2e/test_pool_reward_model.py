"""The reward `reward_model` with vLLM in a frozen pool: its outputs are those of transformers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import unused_port
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from e2e.test_real_run import THOROUGH
from rljob.api.rewards import REWARDS, NotScored
from rljob.api.roles import Rollout
from rljob.rewards.pool_reward_model import PoolRewardModel
from rljob.rewards.reward_model_reward import RewardModelReward
from rljob.rollout import frozen_engine
from rljob.rollout.adapters.vllm.adapter import VllmAdapter
from rljob.rollout.frozen_engine import FrozenEngine
from rljob.rollout.supervisor import EngineProcess

TEMPLATE = "{% for message in messages %}{{ message.role[0] }} {{ message.content }} {% endfor %}"
SAMPLES = [("1 2", "4 5 6 7"), ("3", "8"), ("9 9 9", "1 2 3")]
POOL = {
    "name": "liked", "model": "big", "dtype": "float32", "maxModelLength": 64, "accelerator": {"kind": "cpu"},
    "kvCacheBytes": 1 << 26,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of three labels with random weights, whose words are the numbers from 0 to 99."""
    words = {str(i): i for i in range(100)} | {"u": 100, "a": 101, "?": 102, "end": 103}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end", unk_token="?")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(tmp_path)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=104, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_labels=3, eos_token_id=103, pad_token_id=103, max_position_embeddings=128,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(not THOROUGH, reason="starts vLLM; test_pool_reward_model.py of the service has a fake engine")
@pytest.mark.parametrize("config", [{"format": "chat"}, {"format": "text", "label": 2, "activation": "softmax"}])
async def test_a_pool_gives_the_outputs_of_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    pool, address = Rollout.model_validate(POOL), f"127.0.0.1:{unused_port()}"
    adapter = VllmAdapter(pool, model)
    engine = FrozenEngine(pool, partial(EngineProcess.start, adapter, adapter.launch_frozen), address, "secret", 600.0)
    monkeypatch.setenv("RLJOB_POOL_URLS", json.dumps({"liked": [f"http://{address}"]}))
    monkeypatch.setenv("RLJOB_POOL_TOKEN", "secret")
    parse = REWARDS["reward_model"].parse
    here = RewardModelReward(parse({"model": str(model)} | config), [])
    there = PoolRewardModel(parse({"pool": "liked", "maxTokens": 9} | config), [])
    expected = here(prompt=[p for p, _ in SAMPLES], completion=[c for _, c in SAMPLES], problem=[{}] * len(SAMPLES))
    serving = asyncio.create_task(engine.run())
    try:
        for (prompt, completion), one in zip(SAMPLES, expected, strict=True):
            assert isinstance(one, tuple)
            reward, metrics = await there(prompt=prompt, completion=completion, problem={})
            assert reward == pytest.approx(one[0], abs=1e-4) and metrics == one[1]
        with pytest.raises(NotScored, match=r"the sample has|refused the request"):
            await there(prompt="1 " * 70, completion="2", problem={})
        async with asyncio.timeout(60):  # the request that finds out whether the engine is alive
            path, fields = frozen_engine._probe("/classify")
            reply = await engine.forward(path, json.dumps({"model": "liked"} | fields).encode())
            assert reply.status_code == 200
    finally:
        await there.api.close()
        await engine.leave()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
