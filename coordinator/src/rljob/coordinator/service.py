"""The coordinator process: store, run and server, from start to end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import uvicorn

from rljob.coordinator.recovery import recover
from rljob.coordinator.run import Run
from rljob.coordinator.server import build_app
from rljob.coordinator.status import status_of
from rljob.coordinator.store import Store
from rljob.protocol.environment import PartEnvironment
from rljob.protocol.messages import MAX_FRAME_BYTES
from rljob.protocol.status import encode_status

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0


async def serve(environment: PartEnvironment) -> None:
    """Serve until SIGTERM. The run may end before: its status stays readable.

    Raises:
        ValueError: the surroundings are not right (tokens missing, ledger of another version).
    """
    tokens = json.loads(Path(os.environ["RLJOB_TOKENS"]).read_bytes())
    environment.storage.mkdir(parents=True, exist_ok=True)
    store = Store(environment.storage)
    run = Run(environment.job.spec, store)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(run, tokens),
            host=environment.listen_host,
            port=environment.listen_port,
            ws="websockets-sansio",
            ws_max_size=MAX_FRAME_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=20,
            ws_ping_timeout=20,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )
    committing = asyncio.create_task(store.run())
    recover(run)
    reporting = asyncio.create_task(_report(run, environment.storage / "status.json"))
    serving = asyncio.create_task(server.serve())
    run.changed()
    done, _ = await asyncio.wait({committing, reporting, serving}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # a dead background task ends the process
    reporting.cancel()
    await store.drain()
    committing.cancel()
    write_status(run, environment.storage / "status.json")
    store.close()


async def _report(run: Run, path: Path) -> None:
    """Write the status to a file: every few seconds, and when the run ends."""
    while True:
        write_status(run, path)
        if run.ended.is_set():
            await asyncio.sleep(STATUS_SECONDS)
            continue
        try:
            await asyncio.wait_for(run.ended.wait(), STATUS_SECONDS)
        except TimeoutError:
            continue


def write_status(run: Run, path: Path) -> None:
    """Replace the status file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_status(status_of(run)))
    temporary.replace(path)
