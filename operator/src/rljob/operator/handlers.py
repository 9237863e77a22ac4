"""The operator as kopf handlers: `kopf run -A -m rljob.operator.handlers`, or `-n NAMESPACE` instead of -A.

kopf owns the process: login, watch of the RLJobs, liveness, signals, clean-up, and the handlers of other modules
(`-m acme.hooks`), which run in the same process. Every handler delegates to :mod:`rljob.operator.service`, and
kopf is imported nowhere else. The start returns at once, and the operator waits for its Lease in the background: kopf
answers to liveness probes only after the start.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import click
import kopf

from rljob.api.text_escape import escape_block
from rljob.operator.admission import new_problems
from rljob.operator.admission_server import AdmissionServer
from rljob.operator.config import start_of
from rljob.operator.informers import TypesInstalledError
from rljob.operator.lease import LeaseLostError
from rljob.operator.object_kinds import RLJOBS
from rljob.operator.operator_client import PAGE, FencedError
from rljob.operator.planning.conditions import MAX_MESSAGE_CHARACTERS
from rljob.operator.service import Service

ID, VALIDATE = "rljob", "validate"
STOP_SECONDS = 20.0
"""After a signal the process is killed if it has not ended within this time; a pod has 30 seconds."""
IDLE_SECONDS = 60.0
"""kopf ends the task of an object that has no event for this time; coordinators write a status more often."""
BACKOFFS = (1, 1, 2, 3, 5, 8, 13, 21, *[30] * 120)
"""Waits between attempts of a request by kopf. An hour: kopf ends the process after the last one."""


class EssenceStorage(kopf.AnnotationsDiffBaseStorage):
    """kopf's own storage, for large objects: at each event kopf copies all of the object, and drops most of the copy.

    Coordinators change the status of every job every few seconds.
    """

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        """Return what kopf compares of an object. ``extra_fields``: of handlers, which may be of any part."""
        if not extra_fields:
            metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
            small: Any = {**body, "metadata": metadata, "status": {}}
            body = kopf.Body(small)
        return super().build(body=body, extra_fields=extra_fields)


class ProgressStorage(kopf.SmartProgressStorage):
    """kopf's own storage: at each event kopf makes two more copies to clear the progress of handlers in them."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return ``essence`` without the progress of handlers, which only objects with annotations or a status have."""
        if not essence.get("status") and not essence.get("metadata", {}).get("annotations"):
            return essence
        return super().clear(essence=essence)


@kopf.on.startup(id=ID)
async def start(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Start the operator. Wrong settings, or an address in use, end the process."""
    _configure(settings)
    try:
        parameters = start_of(tuple(_option("namespaces") or ()))
    except ValueError as error:
        raise kopf.PermanentError(str(error)) from error
    logging.getLogger().setLevel(parameters.settings.log_level)
    memo.rljob = Service(parameters, lambda: signal.raise_signal(signal.SIGTERM), _option("liveness_endpoint") or "")
    try:
        await memo.rljob.begin()
    except OSError as error:
        await memo.rljob.stop()
        raise kopf.PermanentError(f"listen: {error}") from error
    except ValueError as error:
        await memo.rljob.stop()
        raise kopf.PermanentError(f"webhook: {error}") from error
    if memo.rljob.admission is not None:
        _review(settings, memo.rljob.admission)


@kopf.on.login(id=ID, retries=3)
async def login(memo: Any, **_: Any) -> kopf.AiohttpSession:
    """Return a session for kopf's requests; kopf logs in again when its credentials were rejected."""
    service: Service = memo.rljob
    return kopf.AiohttpSession(server=service.access.server, aiohttp_session=service.new_session())


@kopf.on.event(RLJOBS.group, RLJOBS.version, RLJOBS.plural, id=ID)
async def take(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    """Store the RLJob and enqueue its key."""
    memo.rljob.operator.caches.take_job(event["type"], event["object"])


async def validate(memo: Any, body: Mapping[str, Any], old: Mapping[str, Any] | None = None, **_: Any) -> None:
    """Refuse an RLJob that the operator would report as InvalidSpec."""
    problems = new_problems(body, old, memo.rljob.operator.cluster)
    if problems:
        raise kopf.AdmissionError(escape_block("; ".join(problems))[:MAX_MESSAGE_CHARACTERS], code=422)


@kopf.on.probe(id="leader")
async def leader(memo: Any, **_: Any) -> bool:
    """Return whether this operator holds the Lease."""
    held: bool = memo.rljob.operator.lease.held
    return held


@kopf.on.probe(id="synced")
async def synced(memo: Any, **_: Any) -> bool:
    """Return whether the caches are filled; a standby's are not."""
    filled: bool = memo.rljob.operator.synced.is_set()
    return filled


@kopf.on.probe(id="watch_age")
async def watch_age(memo: Any, **_: Any) -> float:
    """Return the seconds since the quietest watch received data; 0 for a standby."""
    return round(max(memo.rljob.operator.watch_ages().values(), default=0.0), 1)


@kopf.on.cleanup(id=ID)
async def stop(memo: Any, **_: Any) -> None:
    """Finish the reconciles that run and release the Lease. The process ends with an error if the operator failed."""
    try:
        await memo.rljob.stop()
    except (LeaseLostError, FencedError, TypesInstalledError) as error:
        raise kopf.PermanentError(str(error)) from error


def _configure(settings: kopf.OperatorSettings) -> None:
    """Set what the operator needs of kopf: no write of its own, no right beyond those of the chart."""
    settings.scanning.disabled = True  # namespaces and types are not watched
    settings.peering.standalone = True  # the Lease elects the leader
    settings.posting.enabled = False  # the operator records its events itself
    settings.persistence.finalizer = "rljob.dev/unused"
    settings.persistence.diffbase_storage = EssenceStorage()
    settings.persistence.progress_storage = ProgressStorage()
    settings.watching.chunk_size = PAGE
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.networking.request_timeout = 15.0
    settings.networking.error_backoffs = BACKOFFS
    settings.process.ultimate_exiting_timeout = STOP_SECONDS
    logging.getLogger("kopf.activities.probe").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").addFilter(_is_worth_a_line)


def _review(settings: kopf.OperatorSettings, server: AdmissionServer) -> None:
    """Register the handler of admission; kopf refuses to start with one and without a server for it."""
    settings.admission.server = server.connect
    register = kopf.on.validate(
        RLJOBS.group, RLJOBS.version, RLJOBS.plural, id=VALIDATE, operations=("CREATE", "UPDATE")
    )
    register(validate)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for the lines that kopf logs for every event of an RLJob and for every review."""
    text = str(record.msg)
    if f"'{VALIDATE}' failed permanently" in text:  # the user who wrote the RLJob reads why
        return False
    return record.levelno > logging.INFO or not any(f"'{each}' succeeded" in text for each in (ID, VALIDATE))


def _option(name: str) -> Any:
    """Return an option of the command `kopf run`; None if it is not given or another program runs kopf."""
    context = click.get_current_context(silent=True)
    return context.params.get(name) if context is not None else None
