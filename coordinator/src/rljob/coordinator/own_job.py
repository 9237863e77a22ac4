"""The coordinator's own RLJob in the Kubernetes API: follow it, and apply status.run. Nothing else is read or written.

Whoever is away for long (an API server in an upgrade) is waited for with back-off; each kind of trouble is logged once
until it is over. Nothing here raises for trouble with the API.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rljob.coordinator.metrics import API_REQUESTS

log = logging.getLogger(__name__)

MANAGER = "rljob-coordinator"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
WATCH_SECONDS = 120
"""The server ends a watch after so long, and it is begun again where it ended: so soon a dead connection is noticed."""
ANSWER_SECONDS = 10.0
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
CONFLICT = 409
CONFLICTS = 5
"""So often an apply is tried when others write to the RLJob at the same time."""
EXPIRED = 410
FIRST_ERROR = 400
TROUBLE = (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError)


@dataclass(frozen=True)
class Place:
    """Where the job is, and how one gets there."""

    server: str
    """Address of the API server: https://HOST:PORT."""
    namespace: str
    name: str
    uid: str
    """Of the RLJob: another one of the same name is none of ours. Any when empty."""
    account: Path
    """Directory with `token`, which is replaced from time to time, and `ca.crt`."""


def place_in_cluster() -> Place | None:
    """Return the place that the environment names, or None outside a cluster.

    RLJOB_NAMESPACE, RLJOB_JOB_NAME, RLJOB_JOB_UID: the RLJob. KUBERNETES_SERVICE_HOST and _PORT: the API server, as
    the kubelet sets them. RLJOB_SERVICE_ACCOUNT: directory of the service account, where Kubernetes puts it by default.

    Raises:
        ValueError: the job is named, but not the API server.
    """
    namespace, name = os.environ.get("RLJOB_NAMESPACE", ""), os.environ.get("RLJOB_JOB_NAME", "")
    if not (namespace and name):
        return None
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ValueError("KUBERNETES_SERVICE_HOST is not set, though RLJOB_JOB_NAME is; unset one or set the other")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    account = Path(os.environ.get("RLJOB_SERVICE_ACCOUNT") or SERVICE_ACCOUNT)
    return Place(server, namespace, name, os.environ.get("RLJOB_JOB_UID", ""), account)


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


class _Status(msgspec.Struct):
    draining: list[str] = []
    run: _Run | None = None


class Seen(msgspec.Struct):
    """What the coordinator reads of its RLJob."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[Seen]


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Applied(msgspec.Struct):
    metadata: _Metadata


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


_list_decoder = msgspec.json.Decoder(_List)
_event_decoder = msgspec.json.Decoder(_Event)
_seen_decoder = msgspec.json.Decoder(Seen)
_failure_decoder = msgspec.json.Decoder(_Failure)
_applied_decoder = msgspec.json.Decoder(_Applied)


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"HTTP {code}: {message}" if message else f"HTTP {code}")
        self.code = code


class Backoff:
    """Waits that double, with some chance in them."""

    def __init__(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS

    def reset(self) -> None:
        """It went well."""
        self._seconds = FIRST_BACKOFF_SECONDS

    async def wait(self) -> None:
        """Wait, longer every time."""
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(2 * self._seconds, LAST_BACKOFF_SECONDS)


class Complaints:
    """Says every kind of trouble once, and once that it is over."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._said: set[str] = set()

    def about(self, error: BaseException) -> None:
        """Something failed."""
        kind = f"{type(error).__name__} {getattr(error, 'code', '')}"
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        log.log(level, "%s: %s; it is tried again, and the run goes on", self._doing, error or type(error).__name__)

    def over(self) -> None:
        """It went well."""
        if self._said:
            log.info("%s: it works again", self._doing)
            self._said.clear()


class OwnJob:
    """One RLJob; to be closed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.heard_at = 0.0
        """Monotonic time of the last word from the API server about the job; 0 before the first."""
        self.gone = False
        """It was deleted, and there may be another of its name: nothing is to be told to that one. (By then the token
        is not taken either, as the service account is deleted with the job.)"""
        base = f"{place.server}/apis/rljob.dev/v1alpha1/namespaces/{place.namespace}/rljobs"
        self._all, self._one = base, f"{base}/{place.name}"
        self._version = 0  # the newest of our RLJob that is known; 0: unknown
        self._chosen = {"fieldSelector": f"metadata.name={place.name}"}
        self._session: aiohttp.ClientSession | None = None

    async def follow(self, take: Callable[[Seen], None]) -> None:
        """Give the job as it is to ``take``, and again whenever it has changed, for ever."""
        backoff, complaints = Backoff(), Complaints("following the job's RLJob")
        while True:
            try:
                listed = await self._list()
                self.gone = not any(self._is_own(seen) for seen in listed.items)
                backoff.reset()
                complaints.over()
                for seen in listed.items:
                    if self._is_own(seen):
                        self._note(seen.metadata)
                        take(seen)
                await self._watch(listed.metadata.resource_version, take)
            except ApiError as error:
                if error.code == EXPIRED:  # what happened since is not kept any more: look anew
                    continue
                complaints.about(error)
            except TROUBLE as error:
                complaints.about(error)
            await backoff.wait()

    async def _list(self) -> _List:
        async with self._request("GET", self._all, self._chosen, ANSWER_SECONDS, "list") as response:
            listed = _list_decoder.decode(await response.read())
        self.heard_at = time.monotonic()
        return listed

    async def _watch(self, version: str, take: Callable[[Seen], None]) -> None:
        """Give every change since ``version`` to ``take``, until something breaks."""
        while True:
            options = self._chosen | {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
            options["timeoutSeconds"] = str(WATCH_SECONDS)
            async with (
                self._request("GET", self._all, options, WATCH_SECONDS + ANSWER_SECONDS, "watch") as response,
                aclosing(_lines(response)) as lines,
            ):
                async for line in lines:
                    event = _event_decoder.decode(line)
                    if event.type == "ERROR":
                        failure = _failure_decoder.decode(event.object)
                        raise ApiError(failure.code, failure.message)
                    seen = _seen_decoder.decode(event.object)
                    version, self.heard_at = seen.metadata.resource_version, time.monotonic()
                    if event.type in ("ADDED", "MODIFIED", "DELETED") and self._is_own(seen):
                        self.gone = event.type == "DELETED"
                        if not self.gone:
                            self._note(seen.metadata)
                            take(seen)

    def _is_own(self, seen: Seen) -> bool:
        return self.place.uid in ("", seen.metadata.uid)

    async def apply_run(self, run: dict[str, Any]) -> int:
        """Make ``run`` the job's status.run; return the RLJob's resourceVersion with it.

        The version that is thought to be there goes along: that is how a job of the same name which has taken the place
        of ours is left alone (a patch of the status does not look at uid).

        Raises:
            ApiError: the API server refuses it, or the RLJob of this name is another one (code 409).
            OSError, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError: it was not reached.
        """
        for _ in range(CONFLICTS):
            if not self._version:
                await self._look()
            try:
                return await self._apply(run)
            except ApiError as error:
                if error.code != CONFLICT:
                    raise
                self._version = 0
        raise ApiError(CONFLICT, "the RLJob is written to by others all the time")

    async def _look(self) -> None:
        """Read the RLJob's version."""
        async with self._request("GET", self._one, {}, ANSWER_SECONDS, "get") as response:
            seen = _seen_decoder.decode(await response.read())
        self.gone = not self._is_own(seen)
        if self.gone:
            raise ApiError(CONFLICT, f"the RLJob {self.place.name} is another one by now (uid {seen.metadata.uid})")
        self._note(seen.metadata)

    async def _apply(self, run: dict[str, Any]) -> int:
        metadata = {"name": self.place.name, "resourceVersion": str(self._version)}
        body = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "status": {"run": run}}
        options = {"fieldManager": MANAGER, "force": "true"}
        async with self._request("PATCH", f"{self._one}/status", options, ANSWER_SECONDS, "apply", body) as response:
            applied = _applied_decoder.decode(await response.read())
        self._note(applied.metadata)
        return int(applied.metadata.resource_version)

    def _note(self, metadata: _Metadata) -> None:
        """Remember the newest version of our RLJob."""
        self._version = max(self._version, int(metadata.resource_version or 0))

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, options: dict[str, str], seconds: float, verb: str, body: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a good answer, while it is read. The token is read anew for each: Kubernetes replaces it."""
        token = (self.place.account / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/apply-patch+yaml"  # of which JSON is a part
        code = "none"
        try:
            async with self._opened().request(
                method,
                url,
                params=options,
                headers=headers,
                data=msgspec.json.encode(body) if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=ANSWER_SECONDS),
            ) as response:
                code = str(response.status)
                if response.status >= FIRST_ERROR:
                    raise ApiError(response.status, _said(await response.read()))
                yield response
        except aiohttp.ClientConnectorCertificateError:
            await self.close()  # the authority's certificate may have been replaced
            raise
        finally:
            API_REQUESTS.labels(verb, code).inc()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            certificates = ssl.create_default_context(cafile=str(self.place.account / "ca.crt"))
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=certificates))
        return self._session

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _said(body: bytes) -> str:
    """Return the message of an error's body, which is a Status unless something stands between."""
    try:
        return _failure_decoder.decode(body).message
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace")


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a body; a line is an event and may be as large as an object."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
