"""HTTP API over a run's ledger and checkpoints: samples, audit, and the files of a model.

    GET /v1/samples                          SampleRows; a header Rljob-Note says why there are none
    GET /v1/samples/NAME                     a SampleDetail
    GET /v1/audit                            a Report
    GET /v1/checkpoints                      the checkpoints that are kept: step, and the files of its model with bytes
    GET /v1/checkpoints/STEP/FILE?offset=N   a file, from its Nth byte

Nothing is written, and the event loop, which trains, is not held up: short questions go to a thread, long ones to a
process of their own (:mod:`rljob.ledger.query_worker`). What takes long begins its answer with spaces, which JSON
allows, so that no proxy takes the connection for dead; a failure is then an object with ``error``.
Prompts, answers and weights are for those who may forward ports to the pod, so in a cluster all this is served on the
pod's loopback alone (:mod:`rljob.coordinator.local_api_server`). Paths are those of the ledger, which other parts name:
nothing outside the storage is read, and no link in it is followed, least of all to the coordinator's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from fastapi import FastAPI, HTTPException, Query, Response
from fastapi import Path as PathParameter
from starlette.responses import StreamingResponse

from rljob.coordinator.trainer_control import is_inside
from rljob.ledger.reader import (
    MOST_SAMPLES,
    LedgerReader,
    SampleRow,
    Selection,
    Sort,
    kept_checkpoints,
    unknown_task,
    why_empty,
)
from rljob.ledger.reader import samples as select_samples
from rljob.ledger.states import Kind, State
from rljob.protocol.checkpoint_files import STATE_FILE
from rljob.protocol.run_status import NOTE_HEADER

log = logging.getLogger(__name__)

LARGEST = 2**53  # of any number in an address
JSON = "application/json"
MOST_REPORTS = 2
"""Processes of a kind at a time; more wait."""
ALIVE_SECONDS = 5.0
"""Between two spaces."""
REPORT_SECONDS = 3600.0
CHUNK = 1 << 20
UNKNOWN = 2
"""Exit code of a worker when there is no such run or sample."""


def add_reports(app: FastAPI, storage: Path) -> None:
    """Add the endpoints for the run in ``storage``."""
    audits, shows = asyncio.Semaphore(MOST_REPORTS), asyncio.Semaphore(MOST_REPORTS)

    @app.get("/v1/samples")
    async def samples(
        task: str | None = None,
        step: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
        state: State | None = None,
        group: str | None = None,
        kind: Kind | None = None,
        sort: Sort = Sort.NEWEST,
        reverse: bool = False,
        limit: Annotated[int, Query(ge=1, le=MOST_SAMPLES)] = 100,
    ) -> Response:
        selection = Selection(task, step, state, group, kind, sort, reverse, limit)
        try:
            body, note = await asyncio.to_thread(_select, storage, selection)
        except LookupError as error:
            raise HTTPException(404, str(error)) from None
        return Response(body, media_type=JSON, headers={NOTE_HEADER: note} if note else None)

    @app.get("/v1/samples/{name}")
    async def sample(name: Annotated[str, PathParameter(max_length=256)]) -> Response:
        return StreamingResponse(_report(shows, "show", str(storage), name), media_type=JSON)

    @app.get("/v1/audit")
    async def audit() -> Response:
        return StreamingResponse(_report(audits, "audit", str(storage)), media_type=JSON)

    @app.get("/v1/checkpoints")
    async def checkpoints() -> Response:
        kept = await asyncio.to_thread(_checkpoints, storage)
        found = [{"step": step, "files": files} for step, (_, files) in sorted(kept.items())]
        return Response(msgspec.json.encode(found), media_type=JSON)

    @app.get("/v1/checkpoints/{step}/{name}")
    async def file(
        step: Annotated[int, PathParameter(ge=0, le=LARGEST)],
        name: str,
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    ) -> Response:
        kept = await asyncio.to_thread(_checkpoints, storage)
        path, files = kept.get(step, ("", {}))
        if not offset <= files.get(name, -1):  # names with slashes in them are none of the files either
            raise HTTPException(404, f"there is no such part of {name} in a checkpoint of step {step}")
        try:
            opened = await asyncio.to_thread(_open, storage, path, name)
        except OSError:
            raise HTTPException(404, f"the checkpoint of step {step} was removed") from None
        length = {"Content-Length": str(files[name] - offset)}
        return StreamingResponse(_pieces(opened, offset), media_type="application/octet-stream", headers=length)


def _select(storage: Path, selection: Selection) -> tuple[bytes, str]:
    """Return the samples as JSON, and why there are none.

    Raises:
        LookupError: there is no such task.
    """
    with LedgerReader(storage) as ledger:
        if problem := unknown_task(ledger, selection):
            raise LookupError(problem)
        rows: list[SampleRow] = select_samples(ledger, selection)
        return msgspec.json.encode(rows), "" if rows else why_empty(ledger, selection)


def _checkpoints(storage: Path) -> dict[int, tuple[str, dict[str, int]]]:
    """Return step → path in the storage and the model's files (name → bytes) of the checkpoints that are kept."""
    with LedgerReader(storage) as ledger:
        checkpoints = kept_checkpoints(ledger)
    kept = {}
    for step, path in checkpoints:
        with contextlib.suppress(OSError):  # it is being removed
            with _directory(storage, path) as directory, os.scandir(directory) as entries:
                files = {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False) and entry.name != STATE_FILE  # the trainer's own
                }
            kept[step] = (path, dict(sorted(files.items())))
    return kept


@contextlib.contextmanager
def _directory(storage: Path, path: str) -> Iterator[int]:
    """Give a descriptor of a directory in the storage. No link is followed: other parts write there, and what the
    coordinator alone may read (its tokens) is not to be had by a link to it.

    Raises:
        OSError: there is no such directory, or there is a link on the way.
    """
    if not is_inside(path):
        raise FileNotFoundError(path)
    with contextlib.ExitStack() as opened:
        here = None
        for part in (str(storage), *Path(path).parts):
            follow = 0 if here is None else os.O_NOFOLLOW
            here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | follow, dir_fd=here)
            opened.callback(os.close, here)
        assert here is not None, "the storage is there at least"
        yield here


def _open(storage: Path, path: str, name: str) -> BinaryIO:
    """Open a file of a checkpoint. Raises as :func:`_directory`."""
    with _directory(storage, path) as directory:
        return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory), "rb")


async def _pieces(file: BinaryIO, offset: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(offset)
        while piece := await asyncio.to_thread(file.read, CHUNK):
            yield piece


async def _report(slots: asyncio.Semaphore, *arguments: str) -> AsyncIterator[bytes]:
    """Yield a report; it is given up when the reader goes away."""
    finding = asyncio.create_task(_run(slots, arguments))
    try:
        while not finding.done():
            yield b" "
            await asyncio.wait({finding}, timeout=ALIVE_SECONDS)
        yield finding.result()
    finally:
        finding.cancel()


async def _run(slots: asyncio.Semaphore, arguments: tuple[str, ...]) -> bytes:
    async with slots:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rljob.ledger.query_worker", *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), REPORT_SECONDS)
        except TimeoutError:
            return _error(f"it took longer than {REPORT_SECONDS:.0f} s; look at a copy of the storage instead")
        finally:
            await _end(process)
    if process.returncode == 0:
        return out
    text = err.decode(errors="replace").strip()
    if process.returncode == UNKNOWN:
        return _error(text)
    log.error("a report (%s) ended with %s: %s", arguments[0], process.returncode, text)
    return _error(f"the report ended with {process.returncode}; the coordinator's log says why")


def _error(sentence: str) -> bytes:
    return msgspec.json.encode({"error": sentence})


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
