"""Logs of a job's pods as one stream, by time. Containers before their last restart and later pods are included.

The name of a pod is shown without the prefix JOB-: coordinator-0, trainer-1-0-x7k2p, rollout-main-5c9d8-abcde.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from rljob.kube.resource_kinds import PODS
from rljob.kube.sync_client import Object
from rljob.local.errors import CliError
from rljob.local.log_reader import Line
from rljob.manifests.names import ROLE
from rljob.remote import missing_pods
from rljob.remote.api import BAD_REQUEST, NOT_FOUND, ApiRefusedError
from rljob.remote.job import RemoteJob
from rljob.remote.lookup import is_active

LIST_PODS_SECONDS = 2.0
"""Interval between two lists of the pods."""
PATIENCE_SECONDS = 60.0
"""Longest wait for an API server that cannot be reached."""
DRAIN_SECONDS = 1.0
"""After the end of the run, all lines are read when no line arrives for this time."""
MAX_DRAIN_SECONDS = 10.0
"""Longest time to read lines after the end of the run."""
READERS = 8
QUEUE_LINES = 10_000


@dataclass(frozen=True)
class ContainerRun:
    """One run of a container of a pod, from start to end."""

    pod: str
    container: str
    component: str
    container_id: str
    """Empty before the container has run."""
    restarts: int


class PodLogs:
    """Reads the logs of a job's pods.

    Args:
        job: that owns the pods.
        components: roles (trainer), kinds of roles (rollout, reward, environment) or pods; all when empty.
        named: whether the user named the job; else the first component may be meant as the name of a job.
        follow: wait for pods that do not exist yet.

    Raises:
        CliError: exit code 2: a component does not exist; 1: the job has no pods, and ``follow`` is not set.
    """

    def __init__(self, job: RemoteJob, components: Sequence[str], *, named: bool = True, follow: bool = False) -> None:
        self._job, self._wanted = job, components
        self._last: dict[ContainerRun, float] = {}
        self._lines: queue.Queue[Line | ContainerRun] = queue.Queue(QUEUE_LINES)
        self._followed: set[ContainerRun] = set()
        pods, pods_may_come = self._pods(), follow and is_active(job.body)
        for component in components:
            if not any(_matches(pod, self._name(pod), component) for pod in pods):
                self._check(component, pods, pods_may_come, unnamed=not named and component == components[0])
        if not pods and not pods_may_come:
            raise CliError(f"{job.place} has no pods: {missing_pods.explain(job.body, '')}")
        self.components = sorted({source.component for source in self._sources()})

    def waiting_message(self) -> str:
        """Return why no pod has logs yet; empty if one has."""
        if self.components:
            return ""
        component = self._wanted[0] if len(self._wanted) == 1 else ""
        cause = missing_pods.explain(self._job.body, component)
        return f"waiting for {component or 'pods'} of {self._job.place}: {cause}"

    def history(self, tail: int | None = None) -> list[Line]:
        """Return the existing lines by time, the last ``tail`` of them."""
        sources = list(self._sources())
        with ThreadPoolExecutor(READERS) as readers:
            found = list(readers.map(lambda source: self._read(source, tail), sources))
        for source, lines in zip(sources, found, strict=True):
            self._last[source] = lines[-1].time if lines else 0.0
        merged = list(heapq.merge(*found, key=lambda line: line.time))
        return merged if tail is None else merged[max(0, len(merged) - tail) :]

    def follow(self) -> Iterator[Line]:
        """Yield lines as they are written after those read, until the run is no longer active."""
        last_line_at, listed_at, ended_at = time.monotonic(), float("-inf"), float("inf")
        while True:
            now = time.monotonic()
            if now - listed_at > LIST_PODS_SECONDS:
                try:
                    self._start_streams(self._sources())
                    if not is_active(self._job.read()):
                        ended_at = min(ended_at, now)
                    listed_at = now
                except CliError as error:
                    if error.exit_code == 2 or now - max(listed_at, last_line_at) > PATIENCE_SECONDS:
                        raise
            if now - ended_at > MAX_DRAIN_SECONDS:  # a coordinator that is kept after the end may log forever
                return
            try:
                found = self._lines.get(timeout=DRAIN_SECONDS)
            except queue.Empty:
                if now >= ended_at:
                    return
                continue
            if isinstance(found, ContainerRun):
                self._followed.discard(found)  # the stream ended: it is continued after the next list of the pods
            else:
                last_line_at = time.monotonic()
                yield found

    def _start_streams(self, sources: Mapping[ContainerRun, bool]) -> None:
        for source, running in sources.items():
            if source.container_id and source not in self._followed and (running or source not in self._last):
                self._followed.add(source)
                self._last.setdefault(source, 0.0)
                threading.Thread(target=self._stream, args=(source,), daemon=True).start()

    def _stream(self, source: ContainerRun) -> None:
        """Put the lines of one container into the queue until its log ends."""
        last = self._last.get(source, 0.0)
        query = {"follow": "true", **_since(last)}
        connection_errors = contextlib.suppress(OSError, CliError, http.client.HTTPException, ValueError)
        with connection_errors, self._open(source, query, timeout=None) as answer:
            for line in _lines(answer, source.component, last):
                self._last[source] = line.time
                self._lines.put(line)
        self._lines.put(source)

    def _read(self, source: ContainerRun, tail: int | None) -> list[Line]:
        """Return the lines of a container, with those before its last restart."""
        lines: list[Line] = []
        for before in (True, False) if source.restarts else (False,):
            query = {"previous": "true"} if before else {}
            if tail is not None:
                query["tailLines"] = str(tail)
            try:
                with self._open(source, query) as answer:
                    lines += _lines(answer, source.component)
            except ApiRefusedError as error:
                if error.code not in (BAD_REQUEST, NOT_FOUND):  # the container has not started, or was deleted
                    raise
            except (OSError, http.client.HTTPException) as error:
                raise self._job.namespace.api.unreachable(error) from None
        return lines

    def _open(
        self, source: ContainerRun, query: dict[str, str], timeout: float | None = 30.0
    ) -> http.client.HTTPResponse:
        path = PODS.path(self._job.namespace.name, source.pod, "log")
        query = {"container": source.container, "timestamps": "true", **query}
        return self._job.namespace.api.open("GET", path, query, timeout=timeout)

    def _pods(self) -> list[Object]:
        return self._job.namespace.pods(self._job.name)

    def _sources(self) -> dict[ContainerRun, bool]:
        """Return container → whether it is running."""
        found = {}
        for pod in self._pods():
            name = self._name(pod)
            if self._wanted and not any(_matches(pod, name, component) for component in self._wanted):
                continue
            containers = [container["name"] for container in pod["spec"]["containers"]]
            statuses = {each["name"]: each for each in pod.get("status", {}).get("containerStatuses") or []}
            for container in containers:
                status = statuses.get(container, {})
                component = name if len(containers) == 1 else f"{name}/{container}"
                container_id, restarts = status.get("containerID", ""), status.get("restartCount", 0)
                source = ContainerRun(pod["metadata"]["name"], container, component, container_id, restarts)
                found[source] = "running" in status.get("state", {})
        return found

    def _name(self, pod: Object) -> str:
        return str(pod["metadata"]["name"]).removeprefix(f"{self._job.name}-")

    def _check(self, component: str, pods: Sequence[Object], pods_may_come: bool, unnamed: bool) -> None:
        """Raise the error on a component without a pod, unless a pod may be created later."""
        job, known = self._job, missing_pods.roles(self._job.body)
        present = sorted({str(pod["metadata"]["labels"].get(ROLE)) for pod in pods})
        if not any(missing_pods.includes(component, role) for role in known):
            other = f"no RLJob {component!r}, and " if unnamed else ""
            names = ", ".join(sorted({*known, *present}))
            raise CliError(f"there is {other}no component {component!r} of {job.place}; name one of {names}", 2)
        if not pods_may_come:
            raise CliError(
                f"there is no pod of {component} of {job.place}: {missing_pods.explain(job.body, component, present)}"
            )


def _matches(pod: Object, name: str, component: str) -> bool:
    role = str(pod["metadata"]["labels"].get(ROLE))
    return component in (role, name, pod["metadata"]["name"]) or role.startswith(f"{component}-")


def _since(last: float) -> dict[str, str]:
    """Return the query for lines after ``last``; sinceTime has a resolution of one second."""
    return {"sinceTime": datetime.fromtimestamp(int(last), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")} if last else {}


def _lines(answer: http.client.HTTPResponse, component: str, after: float = 0.0) -> Iterator[Line]:
    """Yield the lines of a log. A line without a timestamp (of the API server) has the time of the line before it."""
    at = after
    for raw in answer:
        stamp, _, text = raw.decode(errors="replace").rstrip("\r\n").partition(" ")
        try:
            at = _time(stamp)
        except ValueError:
            text = f"{stamp} {text}".rstrip()
        else:
            if at <= after:
                continue
        yield Line(at, component, text)


def _time(stamp: str) -> float:
    """Return a timestamp such as 2026-01-31T12:00:00.123456789Z as unix time."""
    whole, _, rest = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + (float(f"0.{rest}") if rest else 0.0)
