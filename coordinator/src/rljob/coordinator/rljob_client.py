"""Kubernetes client for the coordinator's own RLJob: watches it and applies status.run. It accesses no other object.

:meth:`RLJobClient.follow` raises no errors of the API server: it retries requests with back-off as long as the
coordinator runs, and logs each kind of failure once until requests succeed again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rljob.coordinator.metrics import API_REQUESTS
from rljob.kube.access import SERVICE_ACCOUNT, in_cluster_server, service_account
from rljob.kube.client import ApiClient
from rljob.kube.errors import ApiError, ConflictError, GoneError
from rljob.kube.resource_kinds import APPLY_PATCH, RLJOBS
from rljob.kube.watch import decode_event
from rljob.protocol.backoff import Backoff

log = logging.getLogger(__name__)

FIELD_MANAGER = "rljob-coordinator"
WATCH_SECONDS = 120
"""The server ends a watch after this time, and a new watch continues. This bounds the time to detect a dead
connection."""
ANSWER_SECONDS = 10.0
APPLY_TRIES = 5
"""Attempts to apply while other clients write to the RLJob."""
API_FAILURES = (ApiError, OSError, msgspec.MsgspecError)
"""Failures of requests: the API server rejects the request, does not respond, or the response cannot be decoded;
OSError also: the files of the service account cannot be read."""


@dataclass(frozen=True)
class JobRef:
    """The RLJob and the address and credentials of its API server."""

    server: str
    """Address of the API server: https://HOST:PORT."""
    namespace: str
    name: str
    uid: str
    """Of the RLJob; another RLJob of the same name is ignored. Empty: any."""
    account: Path
    """Directory with `token`, which the kubelet rotates, and `ca.crt`."""


def job_ref_from_environment() -> JobRef | None:
    """Return the RLJob that the environment names, or None outside a cluster.

    RLJOB_NAMESPACE, RLJOB_JOB_NAME, RLJOB_JOB_UID: the RLJob. KUBERNETES_SERVICE_HOST and _PORT: the API server, set by
    the kubelet. RLJOB_SERVICE_ACCOUNT: directory of the service account; default: where Kubernetes mounts it.

    Raises:
        ValueError: the job is named, but not the API server.
    """
    namespace, name = os.environ.get("RLJOB_NAMESPACE", ""), os.environ.get("RLJOB_JOB_NAME", "")
    if not (namespace and name):
        return None
    server = in_cluster_server()
    if server is None:
        raise ValueError("KUBERNETES_SERVICE_HOST is not set, though RLJOB_JOB_NAME is; unset one or set the other")
    account = Path(os.environ.get("RLJOB_SERVICE_ACCOUNT") or SERVICE_ACCOUNT)
    return JobRef(server, namespace, name, os.environ.get("RLJOB_JOB_UID", ""), account)


class _Metadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    resource_version: str = ""
    generation: int = 0


class _Spec(msgspec.Struct):
    suspend: bool = False


class _Run(msgspec.Struct, rename="camel"):
    state: str = ""
    reason: str = ""
    observed_generation: int = 0


class _Status(msgspec.Struct, rename="camel"):
    draining: list[str] = []
    evicted_at: str | None = None
    run: _Run | None = None


class RLJobView(msgspec.Struct):
    """The fields of the RLJob that the coordinator reads."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)

    @property
    def suspends(self) -> bool:
        """Whether the run must write a checkpoint and stop: a user, or Kueue, demands it."""
        return self.spec.suspend or self.status.evicted_at is not None


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[RLJobView]


class _Applied(msgspec.Struct):
    metadata: _Metadata


_list_decoder = msgspec.json.Decoder(_List)
_view_decoder = msgspec.json.Decoder(RLJobView)
_applied_decoder = msgspec.json.Decoder(_Applied)


def _count_request(verb: str, code: str) -> None:
    API_REQUESTS.labels(verb, code).inc()


class LogOnce:
    """Logs each kind of failure once, and the recovery once. ``doing``: the activity that fails."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._logged: set[str] = set()

    def failed(self, error: BaseException) -> None:
        """Log ``error``: the first time as a warning, then at level DEBUG."""
        kind = f"{type(error).__name__} {getattr(error, 'code', '')}"
        level = logging.DEBUG if kind in self._logged else logging.WARNING
        self._logged.add(kind)
        log.log(level, "%s: %s; retrying, the run continues", self._doing, error or type(error).__name__)

    def succeeded(self) -> None:
        """Log the recovery if there was a failure before."""
        if self._logged:
            log.info("%s: it works again", self._doing)
            self._logged.clear()


class RLJobClient:
    """Requests about one RLJob; the caller closes it."""

    def __init__(self, job: JobRef) -> None:
        self.job = job
        self.last_event_at = 0.0
        """Monotonic time of the last list or watch event about the job; 0 before the first."""
        self.gone = False
        """Whether the RLJob was deleted. Nothing is applied to another RLJob of the same name. (The API server then
        also rejects the token, as the service account is deleted with the job.)"""
        self._version = 0  # newest known resourceVersion of the RLJob; 0: unknown
        self._selector = {"fieldSelector": f"metadata.name={job.name}"}
        self._client: ApiClient | None = None

    async def follow(self, on_update: Callable[[RLJobView], None]) -> None:
        """Call ``on_update`` with the current RLJob and after every change. Never returns."""
        backoff, failures = Backoff(), LogOnce("following the job's RLJob")
        while True:
            try:
                listed = await self._list()
                self.gone = not any(self._is_own(view) for view in listed.items)
                backoff.reset()
                failures.succeeded()
                for view in listed.items:
                    if self._is_own(view):
                        self._note(view.metadata)
                        on_update(view)
                await self._watch(listed.metadata.resource_version, on_update)
            except GoneError:  # the server keeps no events since this version: list again
                continue
            except API_FAILURES as error:
                failures.failed(error)
            await backoff.wait()

    async def _list(self) -> _List:
        listed = _list_decoder.decode(await self._send("list", "GET", RLJOBS.path(self.job.namespace), self._selector))
        self.last_event_at = time.monotonic()
        return listed

    async def _watch(self, version: str, on_update: Callable[[RLJobView], None]) -> None:
        """Call ``on_update`` for every change since ``version``, until a request fails."""
        path, stall_seconds = RLJOBS.path(self.job.namespace), WATCH_SECONDS + ANSWER_SECONDS
        while True:
            lines = self._opened().watch(
                path, self._selector, version=version, seconds=WATCH_SECONDS, stall_seconds=stall_seconds
            )
            async with aclosing(lines):
                async for line in lines:
                    event = decode_event(line)
                    view = _view_decoder.decode(event.object)
                    version, self.last_event_at = view.metadata.resource_version, time.monotonic()
                    if event.type in ("ADDED", "MODIFIED", "DELETED") and self._is_own(view):
                        self.gone = event.type == "DELETED"
                        if not self.gone:
                            self._note(view.metadata)
                            on_update(view)

    def _is_own(self, view: RLJobView) -> bool:
        return self.job.uid in ("", view.metadata.uid)

    async def apply_run(self, run: dict[str, Any]) -> int:
        """Apply ``run`` as the job's status.run; return the resourceVersion after it.

        The request names the last known resourceVersion, so that another RLJob that has taken the name is never
        changed (a patch of the status does not check the uid).

        Raises:
            ApiError: the API server rejects the request or does not respond; ConflictError: the RLJob was replaced.
            OSError, msgspec.MsgspecError: see API_FAILURES.
        """
        for _ in range(APPLY_TRIES):
            if not self._version:
                await self._get()
            try:
                return await self._apply(run)
            except ConflictError:
                self._version = 0
        raise ConflictError(409, "Conflict", "other clients keep writing to the RLJob")

    async def _get(self) -> None:
        """Read the resourceVersion of the RLJob."""
        view = _view_decoder.decode(await self._send("get", "GET", RLJOBS.path(self.job.namespace, self.job.name)))
        self.gone = not self._is_own(view)
        if self.gone:
            other = f"the RLJob {self.job.name} was replaced by another one (uid {view.metadata.uid})"
            raise ConflictError(409, "Conflict", other)
        self._note(view.metadata)

    async def _apply(self, run: dict[str, Any]) -> int:
        metadata = {"name": self.job.name, "resourceVersion": str(self._version)}
        body = {"apiVersion": RLJOBS.api_version, "kind": RLJOBS.kind, "metadata": metadata, "status": {"run": run}}
        path = RLJOBS.path(self.job.namespace, self.job.name, "status")
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        applied = _applied_decoder.decode(await self._send("apply", "PATCH", path, query, body))
        self._note(applied.metadata)
        return int(applied.metadata.resource_version)

    def _note(self, metadata: _Metadata) -> None:
        """Store the newest resourceVersion of the RLJob."""
        self._version = max(self._version, int(metadata.resource_version or 0))

    async def _send(
        self, verb: str, method: str, path: str, query: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        return await self._opened().send(verb, method, path, query or {}, timeout, body, APPLY_PATCH)

    def _opened(self) -> ApiClient:
        if self._client is None:
            access = service_account(self.job.server, self.job.account)
            self._client = ApiClient(access, FIELD_MANAGER, count=_count_request)
        return self._client

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
