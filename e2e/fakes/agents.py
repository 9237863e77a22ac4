"""Agent programs of tests, which use OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai

SYSTEM = "You add numbers."
AGAIN = "Are you sure?"


def make_client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """Return a client. Without certificates it takes milliseconds to make; its calls stay on this machine."""
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=httpx.AsyncClient(verify=False, trust_env=False)
    )


async def ask_once(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Ask the question."""
    chat: Any = [{"role": "user", "content": row["question"]}]
    async with make_client(base_url, api_key) as client:
        await client.chat.completions.create(model="policy", messages=chat)


async def ask_at_once(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Ask the question, ask again in two ways at the same time, and begin another conversation."""
    chat: Any = [{"role": "user", "content": row["question"]}]
    async with make_client(base_url, api_key) as client:
        first = await client.chat.completions.create(model="policy", messages=chat)
        chat.append(first.choices[0].message.model_dump())
        histories: list[Any] = [[*chat, {"role": "user", "content": text}] for text in (AGAIN, SYSTEM)]
        histories.append([{"role": "user", "content": AGAIN}])
        calls = [client.chat.completions.create(model="policy", messages=history) for history in histories]
        await asyncio.gather(*calls)


async def ask_twice(base_url: str, api_key: str, row: dict[str, Any], seed: int) -> None:
    """Ask the question, then ask again after the answer, with all fields that the client gives it."""
    chat: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    async with make_client(base_url, api_key) as client:
        first = await client.chat.completions.create(model="policy", messages=chat, temperature=seed % 2)
        chat += [first.choices[0].message.model_dump(), {"role": "user", "content": AGAIN}]
        await client.chat.completions.create(model="policy", messages=chat)
