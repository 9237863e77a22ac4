"""HTTP API over a run's ledger and checkpoints: samples, audit, and the files of a model.

    GET /v1/samples                          list of SampleRow; the header Rljob-Note explains an empty list, and counts
                                             failed samples
    GET /v1/samples/NAME                     a SampleDetail
    GET /v1/audit                            a Report
    GET /v1/checkpoints                      the kept checkpoints: step, damage (a sentence, or empty), and of the
                                             model's files name → bytes, name → digest as the trainer recorded it;
                                             a damaged checkpoint has no files; one that is not in the storage has
                                             none either, and record, the digest of its record
    GET /v1/checkpoints/STEP/FILE?offset=N   a file, from byte N on

The API is read-only and does not block the event loop: short queries run in a thread, long ones in a separate process
(:mod:`rljob.ledger.query_worker`). A slow response starts with spaces, which JSON allows, so that no proxy closes an
idle connection; a failure is then an object with ``error``.
Only users who may forward ports to the pod may read prompts, responses and weights, so in a cluster the API is served
on the pod's loopback interface only (:mod:`rljob.coordinator.local_api_server`). Other components report the paths in
the ledger, so no file outside the storage is read and no symbolic link is followed, for example to the coordinator's
tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from fastapi import FastAPI, HTTPException, Query, Response
from fastapi import Path as PathParameter
from starlette.responses import StreamingResponse

from rljob.ledger.failed_samples import failed_note
from rljob.ledger.reader import (
    MOST_SAMPLES,
    DamagedError,
    KeptCheckpoint,
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
from rljob.protocol.checkpoint_files import STATE_FILE, is_inside
from rljob.protocol.checkpoint_record import OTHER_RECORD, decode_state, model_files
from rljob.protocol.child_signals import signal_child
from rljob.protocol.run_status import NOTE_HEADER, encode_note

log = logging.getLogger(__name__)

MAX_NUMBER = 2**53  # limit of numbers in a URL
JSON = "application/json"
MAX_WORKERS = 2
"""Concurrent worker processes for each kind of query; further requests wait."""
KEEPALIVE_SECONDS = 5.0
"""Interval of the spaces in a slow response."""
REPORT_SECONDS = 3600.0
CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 16 << 20
NOT_FOUND = 2
"""Exit code of a worker if the run or sample does not exist."""


def add_ledger_api(app: FastAPI, storage: Path) -> None:
    """Add the endpoints for the run in ``storage``."""
    audits, shows = asyncio.Semaphore(MAX_WORKERS), asyncio.Semaphore(MAX_WORKERS)

    @app.get("/v1/samples")
    async def samples(
        task: str | None = None,
        step: Annotated[int | None, Query(ge=0, le=MAX_NUMBER)] = None,
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
        except DamagedError as error:
            raise HTTPException(500, str(error)) from None
        return Response(body, media_type=JSON, headers={NOTE_HEADER: encode_note(note)} if note else None)

    @app.get("/v1/samples/{name}")
    async def sample(name: Annotated[str, PathParameter(max_length=256)]) -> Response:
        return StreamingResponse(_report(shows, "show", str(storage), name), media_type=JSON)

    @app.get("/v1/audit")
    async def audit() -> Response:
        return StreamingResponse(_report(audits, "audit", str(storage)), media_type=JSON)

    @app.get("/v1/checkpoints")
    async def checkpoints() -> Response:
        kept = await asyncio.to_thread(_checkpoints, storage)
        return Response(msgspec.json.encode(list(kept.values())), media_type=JSON)

    @app.get("/v1/checkpoints/{step}/{name}")
    async def file(
        step: Annotated[int, PathParameter(ge=0, le=MAX_NUMBER)],
        name: str,
        offset: Annotated[int, Query(ge=0, le=MAX_NUMBER)] = 0,
    ) -> Response:
        kept = await asyncio.to_thread(_checkpoints, storage)
        files = kept[step].files if step in kept else {}
        if not offset <= files.get(name, -1):  # also rejects names with slashes
            raise HTTPException(404, f"no checkpoint of step {step} has a file {name} with byte {offset}")
        try:
            opened = await asyncio.to_thread(_open, storage, kept[step].path, name)
        except OSError:
            raise HTTPException(404, f"the checkpoint of step {step} was removed") from None
        length = {"Content-Length": str(files[name] - offset)}
        return StreamingResponse(_chunks(opened, offset), media_type="application/octet-stream", headers=length)


def _select(storage: Path, selection: Selection) -> tuple[bytes, str]:
    """Return (the samples as JSON, a note: the reason if there are none; of failed samples, how many there are).

    Raises:
        LookupError: the task does not exist.
        DamagedError: a value of the ledger is damaged.
    """
    with LedgerReader(storage) as ledger:
        if problem := unknown_task(ledger, selection):
            raise LookupError(problem)
        rows: list[SampleRow] = select_samples(ledger, selection)
        note = failed_note(ledger, selection, len(rows)) if rows else why_empty(ledger, selection)
        return msgspec.json.encode(rows), note


class _Checkpoint(msgspec.Struct):
    """A kept checkpoint, as the client receives it."""

    step: int
    path: str
    files: dict[str, int]
    digests: dict[str, str]
    damage: str = ""
    record: str = ""


def _checkpoints(storage: Path) -> dict[int, _Checkpoint]:
    """Return step → kept checkpoint, oldest first."""
    with LedgerReader(storage) as ledger:
        checkpoints = kept_checkpoints(ledger)
    kept = {}
    for known in checkpoints:
        with contextlib.suppress(OSError):  # a link, or it is being removed
            try:
                kept[known.step] = _examine(storage, known)
            except FileNotFoundError:
                if is_inside(known.path):
                    kept[known.step] = _Checkpoint(known.step, known.path, {}, {}, record=known.digest)
    return kept


def _examine(storage: Path, kept: KeptCheckpoint) -> _Checkpoint:
    """Return a checkpoint with the files of its model. The digests of the files are the client's to check.

    Raises:
        OSError: the checkpoint does not exist.
    """
    with _directory(storage, kept.path) as directory, os.scandir(directory) as entries:
        sizes = {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        }
    damage, digests = "", dict[str, str]()
    if STATE_FILE not in sizes:
        damage = f"{STATE_FILE} is missing"
    else:
        try:
            with _open(storage, kept.path, STATE_FILE) as file:
                state = decode_state(file.read(MAX_RECORD_BYTES))
            damage = "" if state.digest == kept.digest else OTHER_RECORD
            digests = model_files(state)
        except ValueError as error:
            damage = f"{STATE_FILE} is damaged ({error})"
    if damage:
        return _Checkpoint(kept.step, kept.path, {}, {}, damage)
    files = {name: size for name, size in sorted(sizes.items()) if name in digests}
    return _Checkpoint(kept.step, kept.path, files, digests)


@contextlib.contextmanager
def _directory(storage: Path, path: str) -> Iterator[int]:
    """Open a directory in the storage; yields its descriptor. Symbolic links are not followed: other components write
    to the storage, and a link could expose files that only the coordinator may read (its tokens).

    Raises:
        OSError: the directory does not exist, or its path contains a symbolic link.
    """
    if not is_inside(path):
        raise FileNotFoundError(path)
    with contextlib.ExitStack() as opened:
        here = None
        for part in (str(storage), *Path(path).parts):
            follow = 0 if here is None else os.O_NOFOLLOW
            here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | follow, dir_fd=here)
            opened.callback(os.close, here)
        assert here is not None, "the path starts with the storage"
        yield here


def _open(storage: Path, path: str, name: str) -> BinaryIO:
    """Open a file of a checkpoint. Raises the errors of :func:`_directory`."""
    with _directory(storage, path) as directory:
        return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory), "rb")


async def _chunks(file: BinaryIO, offset: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(offset)
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


async def _report(slots: asyncio.Semaphore, *arguments: str) -> AsyncIterator[bytes]:
    """Yield the response of a worker, with spaces until it is complete; a disconnected client cancels the worker."""
    result = asyncio.create_task(_run(slots, arguments))
    try:
        while not result.done():
            yield b" "
            await asyncio.wait({result}, timeout=KEEPALIVE_SECONDS)
        yield result.result()
    finally:
        result.cancel()


async def _run(slots: asyncio.Semaphore, arguments: tuple[str, ...]) -> bytes:
    async with slots:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rljob.ledger.query_worker", *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), REPORT_SECONDS)
        except TimeoutError:
            return _error(f"the query took longer than {REPORT_SECONDS:.0f} s; run it on a copy of the storage instead")
        finally:
            await _end(process)
    if process.returncode == 0:
        return out
    text = err.decode(errors="replace").strip()
    if process.returncode == NOT_FOUND:
        return _error(text)
    log.error("the query %s exited with code %s: %s", arguments[0], process.returncode, text)
    return _error(f"the query exited with code {process.returncode}; the coordinator's log has the cause")


def _error(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


async def _end(process: Process) -> None:
    signal_child(process, signal.SIGKILL)
    await process.wait()
