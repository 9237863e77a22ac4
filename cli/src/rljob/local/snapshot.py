"""What can be seen of a run from outside, whether it goes on or not: what `rljob status` shows. Here of a local one."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rljob.local import initializer
from rljob.local.commands import HOST
from rljob.local.errors import CliError
from rljob.local.processes import describe_death, last_line, log_path
from rljob.local.run_directory import MANIFEST, RunDirectory
from rljob.local.view import PartView, View
from rljob.protocol.status import RunStatus, decode_status

ANSWER_SECONDS = 5.0
INITIALIZING = "running the initializer"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is behind no proxy


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment.

    ``state`` is one of starting, running, evaluating, finishing, succeeded, failed, suspended, and interrupted for a
    run that ended before it was done. ``status`` is the coordinator's, or the last one it left.
    """

    place: dict[str, str]
    """Where it is: ``directory``, in a cluster ``context`` and ``namespace``."""
    name: str
    going_on: bool
    state: str
    message: str
    status: RunStatus | None
    parts: list[PartView]
    seconds: float = 0.0
    """Wall clock as the coordinator counts it, or of the last `rljob run` where there is no coordinator yet."""
    detail: str = ""
    """Last line of the initializer's log, while it runs."""
    note: str = ""
    """Why not all is known, in a sentence."""

    @property
    def exit_code(self) -> int:
        """0: going on or succeeded, 1: failed, 3: unfinished and not going on."""
        if self.state == "failed":
            return 1
        return 0 if self.going_on or self.state == "succeeded" else 3

    @property
    def where(self) -> str:
        """Where it is, in one word."""
        return "/".join(filter(None, self.place.values()))

    def view(self) -> View:
        """Return what a screen draws."""
        stage = f"{self.state}: {self.message}" if self.message else self.state
        return View(
            self.name,
            self.where,
            ending=stage,
            detail=self.detail,
            note=self.note,
            status=self.status,
            parts=self.parts,
            began=time.monotonic() - self.seconds,
        )

    def data(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {
            "name": self.name,
            **self.place,
            "going_on": self.going_on,
            "state": self.state,
            "message": self.message,
            "parts": [
                {"name": part.name, "state": part.state, "restarts": part.restarts, "death": part.death}
                for part in self.parts
            ],
            "status": msgspec.to_builtins(self.status),
        }


def look(directory: RunDirectory) -> RunSnapshot:
    """Look at the run in ``directory``.

    Raises:
        CliError: with exit code 2: its manifest is damaged.
    """
    name = _name(directory)
    going_on = directory.running()
    past = _history(directory)
    status = answer = _ask(directory) if going_on and not past.initializing else None
    if status is None and not past.initializing:
        status = directory.status()
    state, message = past.state, past.message
    if going_on and status is not None and (answer is not None or state != "starting"):
        state, message = status.state.lower(), status.message
    elif not going_on and state not in ("succeeded", "failed", "suspended"):
        state = "interrupted"
    if not going_on:
        if not message and state != "succeeded":
            message = "rljob run resumes it"
        for part in past.parts.values():
            part.state = "stopped"
        if status is None and (directory.path / "status.json").exists():
            damage = f"{directory.path / 'status.json'} is damaged, its figures cannot be shown"
            message = f"{message}; {damage}" if message else damage
    elif past.initializing:
        message = INITIALIZING
    until = time.time() if going_on else past.end
    seconds = status.progress.seconds if status is not None else max(0.0, until - past.start)
    log = log_path(directory.path, initializer.NAME)
    detail = last_line(log) if going_on and past.initializing else ""
    place = {"directory": str(directory.path)}
    return RunSnapshot(place, name, going_on, state, message, status, list(past.parts.values()), seconds, detail)


def initializing(directory: RunDirectory) -> bool:
    """Return whether the initializer runs."""
    return directory.running() and _history(directory).initializing


def _name(directory: RunDirectory) -> str:
    path = directory.path / MANIFEST
    try:
        name = json.loads(path.read_bytes())["metadata"]["name"]
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}; have its owner allow it", 2) from None
    except (ValueError, TypeError, KeyError):
        raise CliError(f"{path} is damaged: it is no manifest any more; restore it", 2) from None
    return str(name)


@dataclass
class _EventHistory:
    """What the events of the last `rljob run` tell; times are unix times."""

    state: str = "starting"
    message: str = ""
    parts: dict[str, PartView] = field(default_factory=dict)
    initializing: bool = False
    start: float = 0.0
    end: float = 0.0


def _history(directory: RunDirectory) -> _EventHistory:
    past = _EventHistory()
    for event in _events(directory):
        subject, what = event["subject"], event["event"]
        if subject == "run" and what == "started":
            past = _EventHistory(start=event["time"])
        elif subject == "run":
            past.state, past.message = what.lower(), event.get("message", "")
        elif subject == initializer.NAME:
            past.initializing = what == "started"
        else:
            part = past.parts.setdefault(subject, PartView(subject, "waiting", 0))
            if what == "started":
                part.state = "running"
            elif what == "restarting":
                part.state, part.restarts, part.death = "restarting", part.restarts + 1, describe_death(event)
            elif what == "exited":
                part.state = "stopped"
        past.end = event["time"]
    return past


def _events(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    try:
        lines = (directory.path / "events.jsonl").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # half a line, of a run that was killed or is writing
            continue


def _ask(directory: RunDirectory) -> RunStatus | None:
    """Return the coordinator's status, or None when it does not answer."""
    port = directory.read_json("ports.json").get("coordinator")
    if port is None:
        return None
    try:
        with _opener.open(f"http://{HOST}:{port}/v1/status", timeout=ANSWER_SECONDS) as answer:
            return decode_status(answer.read())
    except (OSError, msgspec.MsgspecError):
        return None
