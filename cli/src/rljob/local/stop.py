"""Stops a run: by a signal to its `rljob run`, which asks the coordinator to suspend."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import aiohttp

from rljob.local.errors import CliError
from rljob.local.processes import GRACE_SECONDS
from rljob.local.run_directory import RunDirectory

POLL_SECONDS = 0.1
COMPONENT_SECONDS = 30.0
"""Longest time for components to end, without the checkpoint."""
RETRY_SECONDS = 0.5
NOT_FOUND = 404


def end(directory: RunDirectory, now: bool) -> None:
    """Signal the `rljob run` of ``directory`` to end; return when none of its processes is left.

    Args:
        directory: of a running run.
        now: do not wait for a checkpoint.

    Raises:
        CliError: the run does not end, or belongs to another user.
    """
    pid = directory.pid()
    if pid is None:
        raise CliError(f"{directory.path / 'lock'} does not contain the run's process id; stop the run in its terminal")
    grace = COMPONENT_SECONDS if now else COMPONENT_SECONDS + directory.job().spec.suspend_grace_seconds + GRACE_SECONDS
    deadline = time.monotonic() + grace
    for number in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):  # equal ones could be merged into one
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            break  # it has already ended
        except PermissionError:
            raise CliError(f"process {pid} is another user's run; ask them to stop it", 2) from None
    while directory.running():
        if time.monotonic() > deadline:
            raise CliError(f"the run in {directory.path} (process {pid}) does not end; try rljob stop --now")
        time.sleep(POLL_SECONDS)


async def ask_to_suspend(url: str, token: str) -> None:
    """Request a suspension repeatedly until cancelled: a restarted coordinator has forgotten earlier requests.

    Returns if the coordinator has no such endpoint.

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
