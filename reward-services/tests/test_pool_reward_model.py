"""The reward `reward_model` with a frozen pool: what it asks an engine, and what it makes of the reply."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob.api.rewards import REWARDS, NotScored
from rljob.rewards import model_api
from rljob.rewards.pool_reward_model import PoolRewardModel, make

SAMPLE: dict[str, Any] = {"prompt": "1+1=", "completion": "2", "problem": {"question": "9 9"}}


def outputs(*values: float, tokens: int = 5) -> dict[str, Any]:
    """Return a reply of vLLM's /classify."""
    found = {"index": 0, "label": "LABEL_0", "probs": list(values), "num_classes": len(values)}
    return {"object": "list", "data": [found], "usage": {"prompt_tokens": tokens}}


class Engine:
    def __init__(self, *replies: web.Response | dict[str, Any] | str) -> None:
        self.replies, self.bodies, self.tokens = list(replies), list[dict[str, Any]](), list[str | None]()

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.tokens.append(request.headers.get("Authorization"))
        reply = self.replies.pop(0)
        if isinstance(reply, web.Response):
            return reply
        return web.Response(text=reply if isinstance(reply, str) else json.dumps(reply))


@asynccontextmanager
async def asking(engine: Engine, monkeypatch: pytest.MonkeyPatch, **config: Any) -> AsyncIterator[PoolRewardModel]:
    app = web.Application()
    app.router.add_post("/classify", engine.answer)
    async with TestServer(app) as server:
        monkeypatch.setattr(model_api, "FIRST_BACKOFF_SECONDS", 0.001)
        monkeypatch.setattr(model_api, "LAST_BACKOFF_SECONDS", 0.001)
        monkeypatch.setenv("RLJOB_POOL_URLS", json.dumps({"liked": [str(server.make_url("")).rstrip("/")]}))
        monkeypatch.setenv("RLJOB_POOL_TOKEN", "secret")
        reward = make(REWARDS["reward_model"].parse({"pool": "liked"} | config), [])
        assert isinstance(reward, PoolRewardModel)
        yield reward
        await reward.api.close()


async def test_a_server_that_stands_for_a_pool_may_have_another_name_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLJOB_POOL_MODEL", "large")
    engine = Engine(outputs(-0.5))
    async with asking(engine, monkeypatch) as reward:
        await reward(**SAMPLE)
    assert engine.bodies[0]["model"] == "large"


async def test_a_chat_is_classified_without_an_activation_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(outputs(-0.5))
    async with asking(engine, monkeypatch) as reward:
        assert await reward(**SAMPLE) == (-0.5, {"tokens": 5.0})
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    expected = {"model": "liked", "use_activation": False, "messages": chat, "add_generation_prompt": False}
    assert engine.bodies == [expected] and engine.tokens == ["Bearer secret"]


async def test_text_of_a_column_label_and_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(outputs(1.0, 3.0), outputs(1.0, 3.0), outputs(1e4, -1e4))
    settings = {"format": "text", "column": "question", "label": 1}
    async with asking(engine, monkeypatch, **settings, activation="softmax") as reward:
        assert (await reward(**SAMPLE))[0] == pytest.approx(math.exp(3) / (math.exp(1) + math.exp(3)))
    async with asking(engine, monkeypatch, **settings, activation="sigmoid") as reward:
        assert (await reward(**SAMPLE))[0] == pytest.approx(1 / (1 + math.exp(-3)))
        assert (await reward(**SAMPLE))[0] == 0
    assert engine.bodies[0] == {"model": "liked", "use_activation": False, "input": "9 92"}


async def test_an_engine_that_is_starting_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(web.Response(status=503), web.Response(status=429), outputs(2.0))
    async with asking(engine, monkeypatch) as reward:
        assert (await reward(**SAMPLE))[0] == 2.0


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (outputs(1.0, tokens=9), "the sample has 9 tokens, and maxTokens is 8"),
        (outputs(), "label 0: the model has 0 labels; lower it"),
        (outputs(math.nan), "an output of the reward model is not finite"),
        ("{}", "the reward model answered something else than outputs"),
        ("[[[", "the reward model answered something else than outputs"),
        ({"data": [{"probs": ["high"]}], "usage": {"prompt_tokens": 1}}, "answered something else than outputs"),
        ({"data": [], "usage": {"prompt_tokens": 1}}, "answered something else than outputs"),
        (web.Response(status=400, text="too long"), r"the reward model refused the request \(HTTP 400: too long\)"),
    ],
)
async def test_a_reply_without_an_output_is_not_scored(
    monkeypatch: pytest.MonkeyPatch, reply: web.Response | dict[str, Any] | str, reason: str
) -> None:
    async with asking(Engine(reply), monkeypatch, maxTokens=8) as reward:
        with pytest.raises(NotScored, match=reason):
            await reward(**SAMPLE)


def test_an_unknown_pool_is_an_error_at_the_start_and_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_POOL_URLS", "{}")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="pool 'liked' is not in RLJOB_POOL_URLS"):
        make(REWARDS["reward_model"].parse({"pool": "liked"}), [])
