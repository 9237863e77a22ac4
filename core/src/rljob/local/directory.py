"""A run directory: the job's storage, and what a local run keeps in it to be resumed.

    job.yaml, job.json   the manifest as given, and resolved
    lock                 held by the `rljob run` that works here
    tokens.json          role → token, for the owner's eyes only
    ports.json           server → port, so that a restarted server is found where it was
    logs/PART.log        what each part wrote
    events.jsonl         what happened when: parts started and ended, states of the run

The rest belongs to the parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob.api.explain import to_data
from rljob.api.models import RLJob
from rljob.local.errors import RunError
from rljob.protocol.status import RunStatus, decode_status

ROLES = ("agent", "trainer", "runner")
CHANGEABLE = ("spec.failurePolicy.", "spec.checkpoints.keep")
"""Fields that may differ when a run is resumed; spec.training.steps may grow besides."""


class RunDirectory:
    """The directory of one run. Use it inside :meth:`opened`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @contextlib.contextmanager
    def opened(self, job: RLJob, manifest: bytes) -> Iterator[bool]:
        """Lock the directory and write down the resolved ``job``; yield whether a run is resumed.

        Raises:
            RunError: with exit code 2 and nothing written: it is in use, holds something else, or another job's run.
        """
        self._refuse_foreign()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}; choose another --run-dir", 2) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path} is in use by another rljob run; wait for it or stop it", 2) from None
            earlier = self._earlier_job()
            if earlier is not None:
                refuse_changes(earlier, to_data(job), str(self.path))
            (self.path / "logs").mkdir(exist_ok=True)
            self.write("job.yaml", manifest)
            self.write("job.json", job.model_dump_json(by_alias=True, indent=2).encode())
            yield earlier is not None

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
        except (OSError, ValueError):
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
        with contextlib.ExitStack() as held:  # all at once, so that no two servers get the same
            for server in servers:
                ports[server] = held.enter_context(_bound(known.get(server, 0))).getsockname()[1]
        self.write("ports.json", json.dumps(ports).encode())
        return ports

    def status(self) -> RunStatus | None:
        """Return the last status that the coordinator left in status.json, if it did."""
        try:
            return decode_status((self.path / "status.json").read_bytes())
        except (OSError, ValueError):
            return None

    def tell(self, subject: str, event: str, **figures: Any) -> None:
        """Append to events.jsonl: one object with unix time, subject (a part, or run) and event."""
        line = json.dumps({"time": round(time.time(), 3), "subject": subject, "event": event, **figures})
        with (self.path / "events.jsonl").open("a") as file:
            file.write(f"{line}\n")

    def _refuse_foreign(self) -> None:
        """Refuse a directory with other people's files in it: the job's storage is cleaned up by its parts."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is not a directory; choose another --run-dir", 2)
        if self.path.is_dir() and not (self.path / "job.json").exists():
            others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ("lock", "logs"))
            if others:
                raise RunError(f"{self.path} holds no run but other files ({others[0]}); choose another --run-dir", 2)

    def _earlier_job(self) -> dict[str, Any] | None:
        try:
            data = (self.path / "job.json").read_bytes()
        except FileNotFoundError:
            return None
        try:
            return to_data(RLJob.model_validate_json(data))
        except ValidationError:
            raise RunError(
                f"{self.path / 'job.json'} is of another version of rljob; use that version or another --run-dir", 2
            ) from None


def _bound(port: int) -> socket.socket:
    """Return a socket bound to ``port`` of loopback, or to any free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    return listener


def refuse_changes(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    """Check that the run of manifest ``before`` may go on as ``after``.

    Raises:
        RunError: names the first field that may not change, with exit code 2.
    """
    for path, old, new in _differences(before, after, ""):
        if path.startswith(CHANGEABLE):
            continue
        if path == "spec.training.steps":
            if new > old:
                continue
            raise RunError(f"{path}: the run in {where} has {old}, which may grow but not become {new}", 2)
        raise RunError(
            f"{path}: the run in {where} was started with {_shown(old)}, not {_shown(new)}; "
            "give it that value, or choose another --run-dir",
            2,
        )


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of the innermost values that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, f"{path}[{i}]")
    elif old != new:
        yield path, old, new


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"
