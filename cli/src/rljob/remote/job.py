"""One RLJob, as the commands of the command line look at it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

import msgspec

from rljob.kube.sync_client import Object
from rljob.local.errors import RunError
from rljob.local.glance import Glance
from rljob.local.view import PartView
from rljob.protocol.status import RunStatus
from rljob.remote.absent import unseen
from rljob.remote.api import FORBIDDEN, RefusedError
from rljob.remote.coordinator import Coordinator, SilentError
from rljob.remote.finding import Namespace, conditions, goes_on, holds, namespace

GLANCE_SECONDS = 10.0
"""A coordinator that does not say how it is within so long does not answer."""
RESUME = "rljob resume goes on with it"


class RemoteJob:
    """An RLJob of a namespace. ``name`` is its own; ``body`` is it as it was read last."""

    def __init__(self, where: Namespace, body: Object) -> None:
        self.namespace, self.body = where, body
        self.name = str(body["metadata"]["name"])

    @property
    def place(self) -> str:
        """Which job this is, for sentences."""
        return f"RLJob {self.name} in {self.namespace.place}"

    @property
    def coordinator(self) -> Coordinator:
        """Its coordinator."""
        return Coordinator(self.namespace, self.body)

    def read(self) -> Object:
        """Read it anew and return it.

        Raises:
            RunError: it is not there any more, or the API server refuses or cannot be reached.
        """
        try:
            self.body = self.namespace.api.get(self.namespace.path(self.name))
        except RefusedError as error:
            if error.missing_object:
                raise RunError(f"the {self.place} was deleted; a retained claim keeps its ledger", 2) from None
            raise
        return self.body

    def look(self) -> Glance:
        """Look at the job: what its coordinator says, or where that cannot be asked what its RLJob does."""
        body = self.read()
        told = (body.get("status") or {}).get("run")
        status, note = None, ""
        try:
            coordinator = Coordinator(self.namespace, body, GLANCE_SECONDS)
            status, _ = coordinator.ask("/v1/status", RunStatus)
        except SilentError as error:
            note = error.sentence if told and goes_on(body) else ""
        except RefusedError as error:
            if error.code != FORBIDDEN:
                raise
            note = f"this is what the RLJob says, without rewards and parts of the coordinator: {error.sentence}"
        if status is None and told:
            status = msgspec.convert(told, RunStatus)
        return glance(self.namespace, body, status, note)

    def claim(self) -> str:
        """Return the name of the claim that keeps its ledger and checkpoints."""
        return self.coordinator.claim


def glance(where: Namespace, body: Object, status: RunStatus | None, note: str = "") -> Glance:
    """Return an RLJob as ``rljob status`` shows runs.

    Args:
        where: its namespace.
        body: it.
        status: of its run, if anybody knows it.
        note: why not all is known.
    """
    going_on = goes_on(body)
    state, message = _state(body, status)
    seconds = status.progress.seconds if status is not None else _age(body)
    place = {"context": where.api.access.context, "namespace": where.name}
    parts = [_part(role, going_on) for role in (body.get("status") or {}).get("roles") or []]
    return Glance(place, str(body["metadata"]["name"]), going_on, state, message, status, parts, seconds, note=note)


def _state(body: Object, status: RunStatus | None) -> tuple[str, str]:
    met = conditions(body)
    if holds(body, "Failed"):
        return "failed", str(met["Failed"]["message"])
    if holds(body, "Complete"):
        return "succeeded", ""
    if holds(body, "Suspended"):
        return "suspended", RESUME
    ready = met.get("Ready", {})
    state = status.state.lower() if status is not None else "starting"
    if "deletionTimestamp" in body["metadata"]:
        return state, "it is being deleted"
    if not ready:
        return state, unseen()
    if status is not None and status.message:
        return state, status.message
    return state, "" if ready["status"] == "True" else str(ready["message"])


def _part(role: Object, going_on: bool) -> PartView:
    ready, desired, summary = int(role["ready"]), int(role["desired"]), str(role.get("summary") or "")
    state = "running" if ready >= desired else "waiting"
    detail = f"{ready}/{desired}{f': {summary}' if summary else ''}"
    restarts, death = int(role.get("restarts") or 0), str(role.get("lastExit") or "")
    return PartView(str(role["name"]), state if going_on and desired else "stopped", restarts, death, detail)


def _age(body: Object) -> float:
    begun = (body.get("status") or {}).get("startTime") or body["metadata"]["creationTimestamp"]
    return max(0.0, time.time() - datetime.fromisoformat(begun).timestamp())


def find(name: str | None, context: str | None, where: str | None) -> RemoteJob:
    """Return the RLJob called ``name``; None: the one that goes on, or the newest when none does.

    Args:
        name: of the RLJob.
        context: of the kubeconfig; None: the current one.
        where: its namespace; None: the context's.

    Raises:
        RunError: with exit code 2: there is no such context, namespace or RLJob.
    """
    chosen = namespace(context, where)
    return RemoteJob(chosen, chosen.find(name))


def find_among(names: Sequence[str], context: str | None, where: str | None) -> tuple[RemoteJob, list[str]]:
    """Return the RLJob that is meant and the other names: the first may be the RLJob's.

    Raises:
        RunError: as :func:`find`.
    """
    chosen = namespace(context, where)
    if names and chosen.has(names[0]):
        return RemoteJob(chosen, chosen.find(names[0])), list(names[1:])
    try:
        return RemoteJob(chosen, chosen.find(None)), list(names)
    except RunError:
        if names:
            chosen.find(names[0])  # says that there is no RLJob of this name, and which there are
        raise
