"""One RLJob, as the commands use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from rljob.kube.sync_client import Object
from rljob.local.errors import CliError
from rljob.local.snapshot import ComponentState, RunSnapshot
from rljob.protocol.run_status import RunStatus, status_from
from rljob.remote.api import FORBIDDEN, ApiRefusedError
from rljob.remote.coordinator_api import CoordinatorApi, CoordinatorUnavailableError
from rljob.remote.lookup import Namespace, conditions, holds, is_active, namespace
from rljob.remote.missing_pods import not_reconciled_message

SNAPSHOT_SECONDS = 10.0
"""A coordinator that has not returned its status for so long does not answer."""
RESUME = "rljob resume resumes it"


class RemoteJob:
    """An RLJob of a namespace. ``body`` is the object as it was read last."""

    def __init__(self, where: Namespace, body: Object) -> None:
        self.namespace, self.body = where, body
        self.name = str(body["metadata"]["name"])

    @property
    def place(self) -> str:
        """Name for messages."""
        return f"RLJob {self.name} in {self.namespace.place}"

    @property
    def coordinator(self) -> CoordinatorApi:
        """Its coordinator."""
        return CoordinatorApi(self.namespace, self.body)

    def read(self) -> Object:
        """Read the object again and return it.

        Raises:
            CliError: it was deleted, or the API server refuses or cannot be reached.
        """
        try:
            self.body = self.namespace.api.get(self.namespace.path(self.name))
        except ApiRefusedError as error:
            if error.missing_object:
                raise CliError(f"the {self.place} was deleted; a retained claim keeps its ledger", 2) from None
            raise
        return self.body

    def snapshot(self) -> RunSnapshot:
        """Return the state of the job: from its coordinator, or from the RLJob if the coordinator cannot be asked."""
        body = self.read()
        recorded = (body.get("status") or {}).get("run")
        status, note = None, ""
        try:
            coordinator = CoordinatorApi(self.namespace, body, SNAPSHOT_SECONDS)
            status = coordinator.status()
        except CoordinatorUnavailableError as error:
            note = error.sentence if recorded and is_active(body) else ""
        except ApiRefusedError as error:
            if error.code != FORBIDDEN:
                raise
            note = f"from the RLJob, without rewards and components of the coordinator: {error.sentence}"
        if status is None and recorded:
            status = status_from(recorded)
        return job_snapshot(self.namespace, body, status, note)

    def claim(self) -> str:
        """Return the name of the claim of its storage."""
        return self.coordinator.claim


def job_snapshot(where: Namespace, body: Object, status: RunStatus | None, note: str = "") -> RunSnapshot:
    """Return the snapshot of an RLJob.

    Args:
        where: its namespace.
        body: the RLJob.
        status: of its run, if it is known.
        note: why the snapshot is incomplete.
    """
    running = is_active(body)
    state, message = _state(body, status)
    seconds = status.progress.seconds if status is not None else _age(body)
    place = {"context": where.api.access.context, "namespace": where.name}
    components = [_component(role, running) for role in (body.get("status") or {}).get("roles") or []]
    return RunSnapshot(
        place, str(body["metadata"]["name"]), running, state, message, status, components, seconds, note=note
    )


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
        return state, not_reconciled_message()
    if status is not None and status.message:
        return state, status.message
    return state, "" if ready["status"] == "True" else str(ready["message"])


def _component(role: Object, running: bool) -> ComponentState:
    ready, desired, summary = int(role["ready"]), int(role["desired"]), str(role.get("summary") or "")
    state = "running" if ready >= desired else "waiting"
    detail = f"{ready}/{desired}{f': {summary}' if summary else ''}"
    restarts, last_exit = int(role.get("restarts") or 0), str(role.get("lastExit") or "")
    return ComponentState(str(role["name"]), state if running and desired else "stopped", restarts, last_exit, detail)


def _age(body: Object) -> float:
    begun = (body.get("status") or {}).get("startTime") or body["metadata"]["creationTimestamp"]
    return max(0.0, time.time() - datetime.fromisoformat(begun).timestamp())


def find(name: str | None, context: str | None, where: str | None) -> RemoteJob:
    """Return the RLJob called ``name``; None: the active one, or the newest when none is active.

    Args:
        name: of the RLJob.
        context: of the kubeconfig; None: the current one.
        where: its namespace; None: the context's.

    Raises:
        CliError: with exit code 2: there is no such context, namespace or RLJob.
    """
    chosen = namespace(context, where)
    return RemoteJob(chosen, chosen.find(name))


def find_among(names: Sequence[str], context: str | None, where: str | None) -> tuple[RemoteJob, list[str]]:
    """Return the RLJob and the other names: the first name may be the RLJob's.

    Raises:
        CliError: as :func:`find`.
    """
    chosen = namespace(context, where)
    if names and chosen.has(names[0]):
        return RemoteJob(chosen, chosen.find(names[0])), list(names[1:])
    try:
        return RemoteJob(chosen, chosen.find(None)), list(names)
    except CliError:
        if names:
            chosen.find(names[0])  # raises that there is no RLJob of this name, and lists those there are
        raise
