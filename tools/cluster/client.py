"""A small synchronous client of the Kubernetes API for tests, independent of the operator's own.

Paths are the API's ("/api/v1/namespaces/default/pods"); :meth:`Api.path` makes them from a kind. Usable from several
threads, so that asynchronous tests can do ``await asyncio.to_thread(api.wait_for, …)``.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

Object = dict[str, Any]
Objects = list[Object]
API = "rljob.dev/v1alpha1"
VERSIONS = {
    "RLJob": API,
    "RLJobScale": API,
    "Job": "batch/v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "RayCluster": "ray.io/v1",
}
"""Kind → API version of a job's objects; all others are v1."""
T = TypeVar("T")

PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
_TIMEOUT_SECONDS = 60.0


class ApiError(Exception):
    """The API server rejected a request: HTTP ``code``; ``reason`` and ``message`` of its Status object."""

    def __init__(self, code: int, body: Object) -> None:
        self.code, self.body = code, body
        self.reason: str = body.get("reason", "")
        self.message: str = body.get("message", "")
        super().__init__(f"{code} {self.reason}: {self.message}")


class Api:
    """A client of one API server with one token, or of a `kubectl proxy`, which needs neither token nor TLS."""

    def __init__(self, host: str, port: int, authority: Path | None = None, token: str = "") -> None:
        self._host, self._port, self._token = host, port, token
        self._tls = ssl.create_default_context(cafile=authority) if authority else None
        self._idle: list[http.client.HTTPConnection] = []  # append and pop are atomic
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}
        self.warnings: list[str] = []
        """Warnings of the API server, for example unknown fields."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Object:
        """Return the object at ``path``."""
        return self.request("GET", path, query=query)

    def list(self, path: str, **query: Any) -> Objects:
        """Return the items of the collection ``path``; for example ``labelSelector="rljob.dev/job=sums"``."""
        items: Objects = self.request("GET", path, query=query)["items"]
        return items

    def exists(self, path: str) -> bool:
        """Return whether ``path`` exists."""
        return self.get_or_none(path) is not None

    def get_or_none(self, path: str) -> Object | None:
        """Return the object at ``path``, or None if it does not exist."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def post(self, path: str, body: Object, **query: Any) -> Object:
        """Create ``body`` in the collection ``path``."""
        return self.request("POST", path, body, query)

    def put(self, path: str, body: Object, **query: Any) -> Object:
        """Replace the object at ``path``."""
        return self.request("PUT", path, body, query)

    def patch(self, path: str, body: Any, kind: str = "merge", **query: Any) -> Object:
        """Patch the object at ``path``; ``kind`` is one of PATCHES."""
        return self.request("PATCH", path, body, query, PATCHES[kind])

    def apply(self, path: str, body: Object, manager: str = "test", force: bool = True, **query: Any) -> Object:
        """Server-side apply ``body`` to ``path`` as field manager ``manager``."""
        return self.patch(path, body, "apply", fieldManager=manager, force=str(force).lower(), **query)

    def delete(self, path: str, **query: Any) -> Object:
        """Delete the object at ``path``; the default propagationPolicy is Background."""
        return self.request("DELETE", path, query={"propagationPolicy": "Background", **query})

    def create(self, body: Object) -> Object:
        """Create an object at the path of its kind and namespace."""
        return self.post(self.path(body["apiVersion"], body["kind"], body["metadata"].get("namespace")), body)

    def apply_object(self, body: Object, manager: str = "test") -> Object:
        """Apply an object at the path of its kind, namespace and name."""
        metadata = body["metadata"]
        path = self.path(body["apiVersion"], body["kind"], metadata.get("namespace"), metadata["name"])
        return self.apply(path, body, manager)

    def events(self, namespace: str, name: str) -> Objects:
        """Return the events about the object ``name``, the newest last."""
        found = self.list(f"/api/v1/namespaces/{namespace}/events", fieldSelector=f"involvedObject.name={name}")
        return sorted(found, key=lambda event: int(event["metadata"]["resourceVersion"]))

    def watch(self, path: str, seconds: float, **query: Any) -> Iterator[Object]:
        """Yield the watch events of the collection ``path`` for ``seconds``."""
        query = {"watch": "true", "timeoutSeconds": max(1, round(seconds)), **query}
        connection = self._connect()
        try:
            connection.request("GET", f"{path}?{urlencode(query)}", headers=self._headers(None))
            answer = connection.getresponse()
            if answer.status >= 400:
                raise ApiError(answer.status, _parse(answer.read()))
            for line in answer:
                yield json.loads(line)
        finally:
            connection.close()

    def request(
        self, method: str, path: str, body: Any = None, query: Object | None = None, content: str = "application/json"
    ) -> Object:
        """Send a request and return the object of the response.

        Raises:
            ApiError: the API server rejected it.
            OSError: the API server cannot be reached.
        """
        url = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body).encode()
        answer, text = self._answer(method, url, data, self._headers(None if data is None else content))
        self.warnings += answer.headers.get_all("Warning", [])
        if answer.status >= 400:
            raise ApiError(answer.status, _parse(text))
        return _parse(text)

    def _headers(self, content: str | None) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers if content is None else headers | {"Content-Type": content}

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_SECONDS)
        return http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_SECONDS, context=self._tls)

    def _answer(
        self, method: str, url: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        while True:
            connection, reused = (self._idle.pop(), True) if self._idle else (self._connect(), False)
            try:
                connection.request(method, url, data, headers)
                answer = connection.getresponse()
                text = answer.read()
            except (ConnectionError, ssl.SSLEOFError):
                connection.close()
                if not reused:  # the server may have closed an idle connection
                    raise
            except BaseException:  # including Ctrl-C: a connection with a partial answer is not reused
                connection.close()
                raise
            else:
                self._idle.append(connection)
                return answer, text

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    # --- paths --------------------------------------------------------------------------------------------------------

    def path(self, version: str, kind: str, namespace: str | None = None, name: str | None = None) -> str:
        """Return the path of a collection or an object, for example for ("batch/v1", "Job", "default", "train").

        Raises:
            KeyError: the API server has no such kind.
        """
        if (version, kind) not in self._resources:
            self._discover(version)
        plural, namespaced = self._resources[version, kind]
        parts = [_root(version), *(["namespaces", namespace or "default"] if namespaced else []), plural]
        return "/".join([*parts, *([name] if name else [])])

    def _discover(self, version: str) -> None:
        for resource in self.get(_root(version))["resources"]:
            if "/" not in resource["name"]:
                self._resources[version, resource["kind"]] = (resource["name"], resource["namespaced"])

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_for(self, probe: Callable[[], T | None], seconds: float = 30.0, what: str = "", every: float = 0.05) -> T:
        """Call ``probe`` until its result is true and return the result; an ApiError counts as false.

        Raises:
            TimeoutError: after ``seconds``; the message has the last result of ``probe``.
        """
        deadline = time.monotonic() + seconds
        last: object = None
        while True:
            try:
                if found := probe():
                    return found
                last = found
            except ApiError as error:
                last = error
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what or 'the condition'}: not within {seconds:g} s; last: {last!r}")
            time.sleep(every)

    def wait_gone(self, path: str, seconds: float = 30.0) -> None:
        """Wait until ``path`` does not exist."""
        self.wait_for(lambda: not self.exists(path), seconds, f"{path} to be gone")

    def wait_condition(self, path: str, condition: str, status: str = "True", seconds: float = 30.0) -> Object:
        """Wait until the object at ``path`` has ``condition`` with ``status``, and return the object."""

        def probe() -> Object | None:
            found = self.get(path)
            has = {c["type"]: c["status"] for c in (found.get("status") or {}).get("conditions") or []}
            return found if has.get(condition) == status else None

        return self.wait_for(probe, seconds, f"{path} to be {condition}={status}")


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _parse(text: bytes) -> Object:
    try:
        found = json.loads(text)
    except ValueError:
        return {"message": text.decode(errors="replace")}  # health checks answer with plain text
    return found if isinstance(found, dict) else {"message": str(found)}
