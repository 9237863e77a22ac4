"""The coordinator process: starts and stops ledger, run and servers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import json
import logging
import os
import signal
import sys
from pathlib import Path

from rljob.api.job_status import State
from rljob.api.models import RLJob
from rljob.coordinator.disk_space import wait_for_space
from rljob.coordinator.job_match import check_same_job
from rljob.coordinator.local_api_server import LocalApiServer
from rljob.coordinator.metrics import REGISTRY, ConnectionCollector
from rljob.coordinator.recovery import recover
from rljob.coordinator.rljob_client import job_ref_from_environment
from rljob.coordinator.routes import build_app
from rljob.coordinator.run import Run
from rljob.coordinator.status_report import final_state, status_of
from rljob.coordinator.status_sync import StatusSync
from rljob.coordinator.tracking import TrackingWriter, finish, follow
from rljob.ledger.ledger_placement import check_placement
from rljob.ledger.store import ledger_directory
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import coordinator_link
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.frames import MAX_FRAME_BYTES
from rljob.protocol.heartbeat import beating
from rljob.protocol.http_server import HttpServer, token_check
from rljob.protocol.run_status import encode_status
from rljob.protocol.websocket_protocol import WebSocketProtocol

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
RETRY_SECONDS = 1.0
COMMIT_SECONDS = 0.005
"""Interval of commits. A sample waits for four of them, in minutes; each costs three fsyncs."""
COLLECTIONS = (20_000, 50, 50)
"""Thresholds of the garbage collector. A sample makes hundreds of objects that reference counts free; with Python's
own thresholds a quarter of the CPU time of a sample went into searching them for cycles."""


async def serve(environment: ComponentEnvironment) -> None:
    """Serve until SIGTERM, or in a cluster until this process must be replaced. The run may end earlier: its status
    stays readable.

    Raises:
        StorageInUseError: another coordinator uses the storage.
        ValueError: wrong configuration or environment (tokens missing, ledger of another version or another job).
    """
    job_ref = job_ref_from_environment()
    tokens = json.loads(Path(os.environ["RLJOB_TOKENS"]).read_bytes())
    environment.storage.mkdir(parents=True, exist_ok=True)
    if job_ref is not None:  # outside a cluster, rljob run waits for disk space
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 of a container has no default handler
        for directory in dict.fromkeys([environment.storage, ledger_directory(environment.storage)]):
            await wait_for_space(directory)
        check_placement(environment.storage)
    ledger = LedgerWriter(environment.storage)
    check_same_job(ledger, RLJob.model_validate_json(Path(os.environ["RLJOB_JOB"]).read_bytes()))
    save_resolved_manifest(environment)
    run = Run(environment.job.spec, ledger)
    server = HttpServer(
        build_app(run, tokens),
        is_token=token_check(tokens.values()),
        host=environment.listen_host,
        port=environment.listen_port,
        ws=WebSocketProtocol,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=coordinator_link.PING_SECONDS,
        ws_ping_timeout=coordinator_link.PING_SECONDS,
        log_level="warning",
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn installs its own handlers while it serves, and raises the signal again afterwards; the default action
        # would end this process.
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    tracking = TrackingWriter(environment.storage, environment.job.spec.tracking.tensorboard)
    committing = asyncio.create_task(ledger.run(COMMIT_SECONDS))
    finished = asyncio.Event()
    run.on_finished = finished.set
    recover(run)
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    following = asyncio.create_task(follow(tracking))
    reporting = asyncio.create_task(_report(run, finished, tracking, environment.storage / "status.json"))
    serving = asyncio.create_task(server.serve())
    working = {committing, following, reporting, serving}
    readers, reading = LocalApiServer(run), set[asyncio.Task[None]]()
    if job_ref is not None:
        reading.add(asyncio.create_task(readers.listen(environment.readers_port)))
        working.add(asyncio.create_task(StatusSync(run, job_ref).serve()))
    REGISTRY.register(ConnectionCollector(server.open_connections))
    run.changed()
    with beating():
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # a dead background task ends the process
    for task in working - {committing, serving}:
        task.cancel()
    server.should_exit = readers.should_exit = True
    await asyncio.wait({serving, *reading})
    await ledger.drain()
    committing.cancel()
    await asyncio.to_thread(finish, tracking)
    write_status(run, environment.storage / "status.json")
    ledger.close()


async def _report(run: Run, finished: asyncio.Event, tracking: TrackingWriter, path: Path) -> None:
    """Write the status file every STATUS_SECONDS. At the end of the run write the last metrics and the final status,
    and set ``run.ended`` only then: a client that reads the end of the run may stop this process, and no later process
    writes these files."""
    while not finished.is_set():
        _try_to_write_status(run, path)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), STATUS_SECONDS)
    await asyncio.to_thread(finish, tracking)
    while not _try_to_write_status(run, path, final_state(run)):
        await asyncio.sleep(RETRY_SECONDS)
    run.ended.set()
    while True:
        await asyncio.sleep(STATUS_SECONDS)
        _try_to_write_status(run, path)


def _try_to_write_status(run: Run, path: Path, state: State | None = None) -> bool:
    """Write the status file; return False if no file descriptor is free."""
    try:
        write_status(run, path, state)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        log.warning("%s cannot be written: %s; retrying", path.name, error.strerror)
        return False
    return True


def save_resolved_manifest(environment: ComponentEnvironment) -> None:
    """Write the resolved manifest to the storage, as ``rljob run`` does. Readers of the ledger need it, even if the
    volume claim outlives the job."""
    path = environment.storage / "job.json"
    if Path(os.environ["RLJOB_JOB"]).absolute() == path.absolute():
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(environment.job.model_dump_json(by_alias=True, indent=2))
    temporary.replace(path)


def write_status(run: Run, path: Path, state: State | None = None) -> None:
    """Replace the status file. Default of ``state``: that of ``run``."""
    status = status_of(run)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_status(dataclasses.replace(status, state=state or status.state)))
    temporary.replace(path)
