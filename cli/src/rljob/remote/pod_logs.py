"""Logs of a job's pods as one stream, by time; with containers before their last restart, and later pods.

The name of a pod is shown without the job's: coordinator-0, trainer-1-0-x7k2p, rollout-main-5c9d8-abcde.
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

LOOK_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
"""Longest wait for an API server that cannot be reached."""
LAST_SECONDS = 1.0
"""So long without a line after the end of the run: everything is read."""
MOST_LAST_SECONDS = 10.0
READERS = 8
WAITING = 10_000  # lines, in memory


@dataclass(frozen=True)
class ContainerRun:
    """A container of a pod, from one start to its end."""

    pod: str
    container: str
    component: str
    life: str
    """Id of the container; empty before it has run."""
    restarts: int


class PodLogs:
    """Reads the logs of a job's pods.

    Args:
        job: of the pods.
        components: roles (trainer), kinds of roles (rollout, reward) or pods; all when empty.
        named: whether the job was named; else the first component may be a wrong name of a job.
        follow: wait for pods that do not exist yet.

    Raises:
        CliError: exit code 2: a component does not exist; 1: the job has no pods, and ``follow`` is not set.
    """

    def __init__(self, job: RemoteJob, components: Sequence[str], *, named: bool = True, follow: bool = False) -> None:
        self._job, self._wanted = job, components
        self._last: dict[ContainerRun, float] = {}
        self._lines: queue.Queue[Line | ContainerRun] = queue.Queue(WAITING)
        self._followed: set[ContainerRun] = set()
        pods, waits = self._pods(), follow and is_active(job.body)
        for component in components:
            if not any(_is(pod, self._name(pod), component) for pod in pods):
                self._check(component, pods, waits, unnamed=not named and component == components[0])
        if not pods and not waits:
            raise CliError(f"{job.place} has no pods: {missing_pods.why(job.body, '')}")
        self.components = sorted({source.component for source in self._sources()})

    def awaited(self) -> str:
        """Return why there is nothing to read yet; empty if there is."""
        if self.components:
            return ""
        component = self._wanted[0] if len(self._wanted) == 1 else ""
        return f"waiting for {component or 'pods'} of {self._job.place}: {missing_pods.why(self._job.body, component)}"

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
        heard, looked, ended = time.monotonic(), float("-inf"), float("inf")
        while True:
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                try:
                    self._start_streams(self._sources())
                    if not is_active(self._job.read()):
                        ended = min(ended, now)
                    looked = now
                except CliError as error:
                    if error.exit_code == 2 or now - max(looked, heard) > PATIENCE_SECONDS:
                        raise
            if now - ended > MOST_LAST_SECONDS:  # a coordinator that is kept after the end may log forever
                return
            try:
                found = self._lines.get(timeout=LAST_SECONDS)
            except queue.Empty:
                if now >= ended:
                    return
                continue
            if isinstance(found, ContainerRun):
                self._followed.discard(found)  # it ended or broke off: the next look continues it
            else:
                heard = time.monotonic()
                yield found

    def _start_streams(self, sources: Mapping[ContainerRun, bool]) -> None:
        for source, running in sources.items():
            if source.life and source not in self._followed and (running or source not in self._last):
                self._followed.add(source)
                self._last.setdefault(source, 0.0)
                threading.Thread(target=self._stream, args=(source,), daemon=True).start()

    def _stream(self, source: ContainerRun) -> None:
        """Put the lines of one container into the queue until its log ends."""
        last = self._last.get(source, 0.0)
        query = {"follow": "true", **_since(last)}
        broken = contextlib.suppress(OSError, CliError, http.client.HTTPException, ValueError)
        with broken, self._open(source, query, timeout=None) as answer:
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
                if error.code not in (BAD_REQUEST, NOT_FOUND):  # it has not started, or was deleted
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
        """Return container → whether it runs."""
        found = {}
        for pod in self._pods():
            name = self._name(pod)
            if self._wanted and not any(_is(pod, name, component) for component in self._wanted):
                continue
            containers = [container["name"] for container in pod["spec"]["containers"]]
            lives = {each["name"]: each for each in pod.get("status", {}).get("containerStatuses") or []}
            for container in containers:
                life = lives.get(container, {})
                component = name if len(containers) == 1 else f"{name}/{container}"
                ident, restarts = life.get("containerID", ""), life.get("restartCount", 0)
                source = ContainerRun(pod["metadata"]["name"], container, component, ident, restarts)
                found[source] = "running" in life.get("state", {})
        return found

    def _name(self, pod: Object) -> str:
        return str(pod["metadata"]["name"]).removeprefix(f"{self._job.name}-")

    def _check(self, component: str, pods: Sequence[Object], waits: bool, unnamed: bool) -> None:
        """Raise the error on a component without a pod, unless its pod may come later."""
        job, known = self._job, missing_pods.roles(self._job.body)
        there = sorted({str(pod["metadata"]["labels"].get(ROLE)) for pod in pods})
        if not any(missing_pods.is_of(component, role) for role in known):
            other = f"no RLJob {component!r}, and " if unnamed else ""
            names = ", ".join(sorted({*known, *there}))
            raise CliError(f"there is {other}no component {component!r} of {job.place}; name one of {names}", 2)
        if not waits:
            raise CliError(
                f"there is no pod of {component} of {job.place}: {missing_pods.why(job.body, component, there)}"
            )


def _is(pod: Object, name: str, component: str) -> bool:
    role = str(pod["metadata"]["labels"].get(ROLE))
    return component in (role, name, pod["metadata"]["name"]) or role.startswith(f"{component}-")


def _since(last: float) -> dict[str, str]:
    """Return the query for lines after ``last``; Kubernetes has whole seconds."""
    return {"sinceTime": datetime.fromtimestamp(int(last), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")} if last else {}


def _lines(answer: http.client.HTTPResponse, component: str, after: float = 0.0) -> Iterator[Line]:
    """Yield the lines of a log with timestamps; those without (the API server's own) belong to the line before."""
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
    """Return the unix time of 2026-01-31T12:00:00.123456789Z."""
    whole, _, rest = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + (float(f"0.{rest}") if rest else 0.0)
