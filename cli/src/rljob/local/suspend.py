"""Asks a run's coordinator to end with a checkpoint; its state is Suspended when that is done."""

from __future__ import annotations

import asyncio

import aiohttp

RETRY_SECONDS = 0.5
NOT_FOUND = 404


async def ask_to_suspend(url: str, token: str) -> None:
    """Ask again and again, for ever, as a coordinator that is killed meanwhile forgets it; return when it cannot be
    asked.

    Args:
        url: address of the coordinator; it may be starting again just now.
        token: of role operator.
    """
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=headers) as session:
        while True:
            try:
                async with session.post(f"{url}/v1/suspend") as response:
                    if response.status == NOT_FOUND:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # it is starting, or was killed and will be started again
            await asyncio.sleep(RETRY_SECONDS)
