"""Asks a run's coordinator to write a checkpoint and end; its state is Suspended after that."""

from __future__ import annotations

import asyncio

import aiohttp

RETRY_SECONDS = 0.5
NOT_FOUND = 404


async def ask_to_suspend(url: str, token: str) -> None:
    """Ask until cancelled, because a restarted coordinator does not remember; return if it has no such endpoint.

    Args:
        url: address of the coordinator, which may be restarting.
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
                pass  # it is starting or restarting
            await asyncio.sleep(RETRY_SECONDS)
