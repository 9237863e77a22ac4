"""An example of an agent: it asks the model, and asks again if the answer has no result. See docs/agents.md.

A manifest names it with `agent: {function: examples.agents.second_look:solve}`.
"""

from typing import Any

import httpx
from openai import AsyncOpenAI


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> str:
    """Return the answer to the question of a row; the task's reward scores it."""
    chat: list[Any] = [{"role": "user", "content": row["question"]}]
    # An HTTP client without certificates takes milliseconds to make, and the endpoint is on this machine.
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=httpx.AsyncClient(verify=False)) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=chat)
            answer = reply.choices[0].message.content or ""
            if "<answer>" in answer:
                break
            chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": row["question"]}]
    return answer
