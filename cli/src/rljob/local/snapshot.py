"""The state of a run at one moment: plain data that every screen renders. Here it is taken of a local run.

``rljob run`` builds it from its supervisors, :mod:`rljob.remote.job` from an RLJob.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.local import run_initializer
from rljob.local.commands import HOST
from rljob.local.errors import CliError
from rljob.local.outage import age_note, outage
from rljob.local.process_usage import Usage
from rljob.local.processes import describe_restart, last_line, log_path
from rljob.local.run_directory import MANIFEST, RunDirectory
from rljob.protocol.run_status import RunStatus, decode_status, status_data

ANSWER_SECONDS = 5.0
INITIALIZING = "running the initializer"
ACTIVE = ("running", "evaluating", "finishing")
"""States of a run that has a coordinator."""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is behind no proxy


@dataclass
class ComponentState:
    """One process of a local run; in a cluster one role of the job, in `rljob top` one pod."""

    name: str
    state: str
    """waiting, running, restarting or stopped; of a pod its phase, or ending."""
    restarts: int
    last_exit: str = ""
    """How it ended before its last restart."""
    detail: str = ""
    """In a cluster: ready and desired pods, and why they differ."""
    usage: Usage | None = None
    """Set by `rljob top` where it is known."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment.

    ``state`` is one of starting, running, evaluating, finishing, succeeded, failed, suspended, and interrupted for a
    run that stopped before it was done. ``status`` is the coordinator's newest, or the last one it wrote.
    """

    place: dict[str, str]
    """``directory``, or in a cluster ``context`` and ``namespace``."""
    name: str
    running: bool
    state: str
    message: str
    status: RunStatus | None
    components: Sequence[ComponentState] = ()
    seconds: float = 0.0
    """Wall clock as the coordinator counts it; before there is a coordinator, since `rljob run` started."""
    detail: str = ""
    """Last line of the initializer's log, while it runs."""
    note: str = ""
    """Why the snapshot is incomplete or old."""

    @property
    def exit_code(self) -> int:
        """Of `rljob status`: 0 running or succeeded, 1 failed, 3 unfinished and not running."""
        if self.state == "failed":
            return 1
        return 0 if self.running or self.state == "succeeded" else 3

    @property
    def location(self) -> str:
        """The run directory, or CONTEXT/NAMESPACE."""
        return "/".join(filter(None, self.place.values()))

    @property
    def stage(self) -> str:
        """State and message."""
        return f"{self.state}: {self.message}" if self.message else self.state

    def data(self) -> dict[str, Any]:
        """Return the snapshot as JSON types."""
        return {
            "name": self.name,
            **self.place,
            "running": self.running,
            "state": self.state,
            "message": self.message,
            "components": [_component_data(component) for component in self.components],
            "status": status_data(self.status) if self.status is not None else None,
        }


def _component_data(component: ComponentState) -> dict[str, Any]:
    usage = dataclasses.asdict(component.usage) if component.usage is not None else {}
    return {
        "name": component.name,
        "state": component.state,
        "restarts": component.restarts,
        "last_exit": component.last_exit,
        **usage,
    }


def take_snapshot(directory: RunDirectory) -> RunSnapshot:
    """Return the state of the run in ``directory``.

    Raises:
        CliError: with exit code 2: its manifest is damaged.
    """
    name = _name(directory)
    running = directory.running()
    past = _history(directory)
    status = answer = _ask(directory) if running and not past.initializing else None
    if status is None and not past.initializing:
        status = directory.status()
    state, message = past.state, past.message
    if running and status is not None and (answer is not None or state != "starting"):
        state, message = status.state.lower(), status.message
    elif not running and state not in ("succeeded", "failed", "suspended"):
        state = "interrupted"
    if not running:
        if not message and state != "succeeded":
            message = "rljob run resumes it"
        for component in past.components.values():
            component.state = "stopped"
        if status is None and (directory.path / "status.json").exists():
            damage = f"{directory.path / 'status.json'} is damaged, its metrics cannot be shown"
            message = f"{message}; {damage}" if message else damage
    elif past.initializing:
        message = INITIALIZING
    note = ""
    if running and past.state in ACTIVE:
        message = outage(directory.path, silent=answer is None) or message
        note = age_note(time.time() - directory.status_time()) if answer is None and status is not None else ""
    elif running and past.state == "starting":
        message = outage(directory.path, silent=False) or message
    until = time.time() if running else past.end
    seconds = status.progress.seconds if status is not None else max(0.0, until - past.start)
    log = log_path(directory.path, run_initializer.NAME)
    detail = last_line(log) if running and past.initializing else ""
    place = {"directory": str(directory.path)}
    components = list(past.components.values())
    return RunSnapshot(place, name, running, state, message, status, components, seconds, detail, note)


def initializing(directory: RunDirectory) -> bool:
    """Return whether the initializer runs."""
    return directory.running() and _history(directory).initializing


def _name(directory: RunDirectory) -> str:
    path = directory.path / MANIFEST
    try:
        name = json.loads(path.read_bytes())["metadata"]["name"]
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}; ask its owner for the permission", 2) from None
    except (ValueError, RecursionError):
        raise CliError(f"{path} is damaged: it is not valid JSON; restore it", 2) from None
    except (TypeError, KeyError):
        raise CliError(f"{path} is damaged: it is not a manifest; restore it", 2) from None
    return str(name)


@dataclass
class _EventHistory:
    """State derived from the events of the last `rljob run`; times are unix times."""

    state: str = "starting"
    message: str = ""
    components: dict[str, ComponentState] = field(default_factory=dict)
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
        elif subject == run_initializer.NAME:
            past.initializing = what == "started"
        else:
            component = past.components.setdefault(subject, ComponentState(subject, "waiting", 0))
            if what == "started":
                component.state = "running"
            elif what == "restarting":
                component.state, component.restarts = "restarting", component.restarts + 1
                component.last_exit = describe_restart(event)
            elif what == "exited":
                component.state = "stopped"
        past.end = event["time"]
    return past


def _events(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    try:
        lines = (directory.path / "events.jsonl").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # half a line, of a run that was killed or is writing
            continue
        if isinstance(event, dict) and {"time", "subject", "event"} <= event.keys():
            yield event


def _ask(directory: RunDirectory) -> RunStatus | None:
    """Return the coordinator's status, or None when it does not answer."""
    port = directory.read_json("ports.json").get("coordinator")
    if port is None:
        return None
    headers = {"Authorization": f"Bearer {directory.read_json('tokens.json').get('owner', '')}"}
    try:
        request = urllib.request.Request(f"http://{HOST}:{port}/v1/status", headers=headers)
        with _opener.open(request, timeout=ANSWER_SECONDS) as answer:
            return decode_status(answer.read())
    except (OSError, ValueError, RecursionError, http.client.HTTPException):  # also of another server at this port
        return None
