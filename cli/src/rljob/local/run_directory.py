"""A run directory: the job's storage, and the files with which a local run is resumed. Only its owner can read it.

    job.yaml, job.json   the manifest as given, and resolved
    version              of the rljob that works here
    lock                 held by the `rljob run` that works here; its process id
    tokens.json          role → token, readable by the owner alone
    ports.json           server → port, so that a restarted server keeps its address
    logs/COMPONENT.log   the output of each component; COMPONENT.log.1 is older
    run.log              the output of `rljob run --detach`
    refused              marker: a component rejected its configuration before the first step
    events.jsonl         events with their times: starts and ends of components, states of the run

The components own the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob.api.explain import to_data
from rljob.api.immutable import run_changes
from rljob.api.models import RLJob
from rljob.local.errors import CliError
from rljob.protocol.free_port import free_port
from rljob.protocol.initializer_stamp import mark_unused
from rljob.protocol.run_status import RunStatus, decode_status

MANIFEST = "job.json"
VERSION = importlib.metadata.version("rljob")
PRIVATE = 0o700
ROLES = ("agent", "trainer", "runner", "reward", "environment", "pool", "owner")
OWN = re.compile(r"lock|logs|run\.log|\..*\.new")
"""Files that a run which never started may have left."""
MADE_BY_COMPONENTS = (
    "ledger.sqlite*",
    "payload",
    "texts",
    "checkpoints",
    "status.json",
    "metrics.jsonl",
    "tensorboard",
    "data.json",
    "models.json",
    "run-id",
)
"""Removed when a rejected run starts again; the initializer's output stays while its inputs are the same."""
LOCK_ATTEMPTS = 5
LOCK_PAUSE_SECONDS = 0.02


class RunDirectory:
    """The directory of one run. Use it inside :meth:`opened`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.made_private = False
        """Other users could read the directory before :meth:`opened`."""

    @contextlib.contextmanager
    def opened(self, job: RLJob, manifest: bytes) -> Iterator[bool]:
        """Lock the directory and write the resolved ``job``; yield whether a run is resumed.

        Raises:
            CliError: with exit code 2 and nothing written: see :meth:`check`.
        """
        self._refuse_foreign()
        try:
            self.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise _cannot_be_made(self.path, error) from None
        with lock:
            if not _locked(lock.fileno()):
                raise self._in_use()
            resumed = self._refuse_other_job(job)
            self._make_private()
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            if not resumed:
                self._reset()
            (self.path / "logs").mkdir(exist_ok=True)
            self.write("version", f"{VERSION}\n".encode())
            self.write("job.yaml", manifest)
            self.write(MANIFEST, job.model_dump_json(by_alias=True, indent=2).encode())
            yield resumed

    def check(self, job: RLJob) -> bool:
        """Check that ``job`` may run here, and write nothing; return whether a run would be resumed.

        Raises:
            CliError: with exit code 2: the directory is in use, cannot be written, holds something else, another job's
                run, or a run of another version of rljob.
        """
        self._refuse_foreign()
        nearest = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not nearest.is_dir():
            raise _cannot_be_made(self.path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise CliError(f"{self.path} cannot be written: {nearest} does not allow it; choose another --run-dir", 2)
        if not os.statvfs(nearest).f_blocks and not _takes_files(nearest):
            raise CliError(f"{self.path} cannot be made: {nearest} takes no files; choose another --run-dir", 2)
        if self.running():
            raise self._in_use()
        return self._refuse_other_job(job)

    def mark_refused(self) -> None:
        """Mark that a component rejected the configuration: the run may start again with another manifest. Not if there
        is a checkpoint, which would be removed."""
        if not any((self.path / "checkpoints").glob("step-*")):
            self.write("refused", b"")

    def running(self) -> bool:
        """Return whether an `rljob run` works here."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def pid(self) -> int | None:
        """Return the process id of the `rljob run` that works here, or of the last one that did."""
        try:
            return int((self.path / "lock").read_text())
        except (OSError, ValueError):
            return None

    def job(self) -> RLJob:
        """Return the resolved job of the run here.

        Raises:
            CliError: with exit code 2: it is of another version of rljob.
        """
        try:
            return RLJob.model_validate_json((self.path / MANIFEST).read_bytes())
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                raise CliError(f"{self.path / MANIFEST} is damaged: it is not valid JSON; restore it", 2) from None
            raise CliError(
                f"{self.path / MANIFEST} is of another version of rljob; use that version or another --run-dir", 2
            ) from None

    def write(self, name: str, data: bytes, mode: int = 0o644) -> Path:
        """Write a file whole or not at all; return its path."""
        path = self.path / name
        new = path.with_name(f".{name}.new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        new.replace(path)
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in file ``name``; empty when there is none."""
        try:
            data = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}

    def tokens(self) -> dict[str, str]:
        """Return role → token, made at the first start."""
        known = self.read_json("tokens.json")
        if not set(ROLES) <= known.keys():
            known = {role: secrets.token_urlsafe(32) for role in ROLES}
            self.write("tokens.json", json.dumps(known).encode(), mode=0o600)
        return known

    def ports(self, servers: list[str]) -> dict[str, int]:
        """Return server → port on loopback: the ports of earlier starts where they are still free."""
        known = self.read_json("ports.json")
        ports: dict[str, int] = {}
        with contextlib.ExitStack() as held:  # all at once, so that no two servers get the same port
            for server in servers:
                ports[server] = held.enter_context(_bound(known.get(server) or free_port())).getsockname()[1]
        self.write("ports.json", json.dumps(ports).encode())
        return ports

    def status(self) -> RunStatus | None:
        """Return the last status that the coordinator wrote to status.json, if any."""
        try:
            return decode_status((self.path / "status.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def status_time(self) -> float:
        """Return the Unix time at which status.json was written; now if there is none."""
        try:
            return (self.path / "status.json").stat().st_mtime
        except OSError:
            return time.time()

    def tell(self, subject: str, event: str, **details: Any) -> None:
        """Append to events.jsonl: one object with unix time, subject (a component, or run) and event. Lost on a full
        disk."""
        what = {"time": round(time.time(), 3), "subject": subject, "event": event, **details}
        line = json.dumps(what).encode() + b"\n"
        with (self.path / "events.jsonl").open("ab", buffering=0) as file:
            end = file.tell()
            try:
                written = file.write(line)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                written = 0
            if written < len(line):
                file.truncate(end)  # no partial line

    def _make_private(self) -> None:
        """Let only the owner read the run: prompts, answers, logs and weights."""
        if not self.path.stat().st_mode & ~PRIVATE & 0o777:
            return
        try:
            self.path.chmod(PRIVATE)
        except OSError as error:
            raise CliError(
                f"{self.path} is readable by other users and cannot be made private: {error.strerror}; choose another "
                "--run-dir",
                2,
            ) from None
        self.made_private = True

    def _refuse_foreign(self) -> None:
        """Refuse a directory with foreign files, because components delete files in the job's storage, and one that all
        users share, such as /tmp."""
        if self.path.exists() and not self.path.is_dir():
            raise CliError(f"{self.path} is not a directory; choose another --run-dir", 2)
        if self.path.is_dir() and self.path.stat().st_mode & stat.S_ISVTX:
            raise CliError(f"{self.path} is shared by all users; choose a --run-dir in it", 2)
        if self.path.is_dir() and not (self.path / MANIFEST).exists():
            others = sorted(entry.name for entry in self.path.iterdir() if not OWN.fullmatch(entry.name))
            if others:
                raise CliError(f"{self.path} holds no run but other files ({others[0]}); choose another --run-dir", 2)

    def _refuse_other_job(self, job: RLJob) -> bool:
        """Return whether an earlier run of ``job`` is here; refuse that of another job or another rljob."""
        if not (self.path / MANIFEST).exists() or (self.path / "refused").exists():
            return False
        try:
            version = (self.path / "version").read_text().strip()
        except OSError:
            version = VERSION
        if version != VERSION:
            raise CliError(
                f"the run in {self.path} is of rljob {version} and this is {VERSION}; use that version to resume it, "
                "or another --run-dir",
                2,
            )
        refuse_changes(to_data(self.job()), to_data(job), str(self.path))
        return True

    def _reset(self) -> None:
        """Remove the files of a rejected run."""
        if not (self.path / "refused").exists():
            return
        for pattern in MADE_BY_COMPONENTS:
            for path in self.path.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        mark_unused(self.path)
        (self.path / "refused").unlink()

    def _in_use(self) -> CliError:
        return CliError(f"{self.path} is in use by another rljob run; wait for it or stop it", 2)


def _locked(lock: int) -> bool:
    """Lock a file; return False when another process works under it. A reader holds it for a moment only."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return True
    return False


def _takes_files(directory: Path) -> bool:
    """Whether a file system without a size, such as /proc or a tmpfs without a limit, is there for files."""
    try:
        with tempfile.TemporaryDirectory(dir=directory):
            return True
    except OSError:
        return False


def _cannot_be_made(path: Path, error: OSError) -> CliError:
    return CliError(f"{path} cannot be made: {error.strerror}; choose another --run-dir", 2)


def _bound(port: int) -> socket.socket:
    """Return a socket bound to ``port`` of loopback, or to any free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", free_port()))
    return listener


def refuse_changes(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    """Check that the run of manifest ``before`` may continue as ``after``.

    Raises:
        CliError: names the first field that may not change, with exit code 2.
    """
    for path, _, _, cause in run_changes(before, after):
        raise CliError(
            f"{path}: the run in {where} was {cause}; give it that value, or choose another --run-dir", exit_code=2
        )
