"""The cluster of the operator benchmark: a control plane, the RBAC of the chart, operator processes, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks import process_counters
from benchmarks.operator_audit import POLICY, AuditLog
from benchmarks.operator_jobs import CLUSTER, STORAGE_CLASS
from rljob.kube.access import Access
from rljob.kube.kubeconfig import from_kubeconfig
from tools.cluster import build
from tools.cluster.controlplane import ControlPlane
from tools.cluster.processes import Process, free_port, tail

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "rljob-system"
ACCOUNT = "rljob-operator"
WORKERS = 16
LATER = ("controller-manager", "scheduler", "kwok")
_STOP_SECONDS = 30.0


def camel(name: str) -> str:
    """Return a snake_case name in camelCase."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class BenchmarkCluster:
    """A control plane of etcd and API server with the CRDs and the RBAC of the chart installed."""

    def __init__(self, plane: ControlPlane, audit: Path) -> None:
        self.plane = plane
        self.audit = AuditLog(audit)
        for found in _chart():
            if found["kind"] != "Deployment":
                plane.api.apply_object(found, "helm")
        self.operator_kubeconfig = plane.service_account_kubeconfig(NAMESPACE, ACCOUNT)

    @property
    def operator_access(self) -> Access:
        """Credentials of the operator's ServiceAccount; system:masters would bypass the API server's flow control."""
        return from_kubeconfig(self.operator_kubeconfig)

    def namespaces(self, names: list[str]) -> None:
        """Create namespaces; they need no controller before pods can be created."""
        for name in names:
            self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": name}})

    def start_controllers(self) -> None:
        """Start the controllers, the scheduler and kwok, which simulates the nodes."""
        for name in LATER:
            self.plane.start(name)


@contextlib.contextmanager
def benchmark_cluster(scratch: Path) -> Iterator[BenchmarkCluster]:
    """Yield a fresh cluster; ``scratch`` holds its audit log."""
    scratch.mkdir(parents=True)
    policy, audit = scratch / "policy.yaml", scratch / "audit.log"
    policy.write_text(POLICY.format(user=f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"))
    flags = {
        "etcd": ["--quota-backend-bytes=8589934592"],  # a thousand jobs have more than the default, 2 GiB
        # Without a size the log is rotated after 100 MB.
        "apiserver": [f"--audit-policy-file={policy}", f"--audit-log-path={audit}", "--audit-log-maxsize=4096"],
        "controller-manager": ["--concurrent-deployment-syncs=16", "--concurrent-replicaset-syncs=16"],
    }
    with ControlPlane(("etcd", "apiserver"), sorted((ROOT / "crds").glob("*.yaml")), flags) as plane:
        plane.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        plane.install([ROOT / "tools" / "cluster" / "storage-class.yaml"])
        assert plane.api.exists(f"/apis/storage.k8s.io/v1/storageclasses/{STORAGE_CLASS}")
        yield BenchmarkCluster(plane, audit)


def _chart() -> list[dict[str, Any]]:
    command = [str(build.ensure("helm") / "helm"), "template", "rljob", str(ROOT / "charts" / "rljob")]
    done = subprocess.run(
        [*command, "--namespace", NAMESPACE, "--kube-version", "1.36.0"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"helm template failed: {done.stderr}")
    return [found for found in yaml.safe_load_all(done.stdout) if found]


class OperatorProcess:
    """An operator with the configuration that it has in a pod, run as a process of this machine."""

    def __init__(self, cluster: BenchmarkCluster, scratch: Path, identity: str, python: Sequence[str] = ()) -> None:
        """Start it. ``python``: options of the interpreter, such as those of a profiler."""
        self.port = free_port("127.0.0.1")
        settings = {
            "cluster": {camel(key): value for key, value in asdict(CLUSTER).items()},
            "workers": WORKERS,
            "listen": f"127.0.0.1:{self.port}",
            "lease": {"name": ACCOUNT, "durationSeconds": 15},
        }
        config = scratch / f"{identity}.json"
        config.write_text(json.dumps(settings))
        command = [sys.executable, *python, "-m", "rljob.operator.main", "--config", str(config)]
        command += ["--kubeconfig", str(cluster.operator_kubeconfig)]
        environment = dict(os.environ) | {"POD_NAME": identity, "POD_NAMESPACE": NAMESPACE}
        self.process = Process(identity, command, scratch / f"{identity}.log", environment)
        self.peak = 0.0
        """Peak resident memory in MiB, set by :meth:`stop`."""

    def cpu_seconds(self) -> float:
        """Return the CPU time used so far."""
        return process_counters.cpu_seconds(self.process.pid)

    def _peak_mib(self) -> float:
        return process_counters.peak_memory_bytes(self.process.pid) / 2**20

    def stop(self) -> None:
        """Send SIGTERM, as Kubernetes does, and wait for the exit.

        Raises:
            TimeoutError: the operator still runs after _STOP_SECONDS.
        """
        if not self.running():
            return
        self.peak = self._peak_mib()
        os.kill(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.running():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the operator did not exit within {_STOP_SECONDS:g} s of SIGTERM:\n{tail(self.process.log)}"
                )
            time.sleep(0.02)

    def running(self) -> bool:
        """Return whether the process runs."""
        try:
            self.process.check()
        except RuntimeError:
            return False
        return True

    async def metrics(self) -> dict[str, float]:
        """Return the operator's metrics: name with labels → value."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def wait_for_lease(self, cluster: BenchmarkCluster, seconds: float = 60.0) -> None:
        """Wait until the operator holds the Lease.

        Raises:
            TimeoutError: it does not within ``seconds``.
        """
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{ACCOUNT}"
        deadline = time.monotonic() + seconds
        while True:
            self.process.check()
            lease = cluster.plane.api.get_or_none(path) or {}
            if self.process.name in (lease.get("spec", {}).get("holderIdentity") or ""):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator does not hold the Lease:\n{tail(self.process.log)}")
            await asyncio.sleep(0.1)


class RequestError(Exception):
    """The API server rejected a request; ``code`` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Script:
    """A client for the actions of users and coordinators: as administrator, or impersonating a user."""

    def __init__(self, plane: ControlPlane) -> None:
        access = from_kubeconfig(plane.kubeconfig)
        self._server, self._headers = access.server, access.headers()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=access.tls or True))

    async def __aenter__(self) -> Script:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(
        self, method: str, path: str, body: Any = None, kind: str = "json", user: str = "", **query: str
    ) -> Any:
        """Send a request and return the body of the response.

        Args:
            method: of HTTP.
            path: below the API server's address.
            body: sent as JSON.
            kind: subtype of the content type; for a patch merge-patch+json or apply-patch+yaml.
            user: user to impersonate.
            query: parameters.

        Raises:
            RequestError: the status is 400 or more.
        """
        headers = {**self._headers, "Content-Type": f"application/{kind}"}
        if user:
            headers["Impersonate-User"] = user
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._server + path, data=data, headers=headers, params=query
        ) as answer:
            found = await answer.json(content_type=None)
            if answer.status >= 400:
                raise RequestError(answer.status, f"{method} {path}: {answer.status} {found.get('message')}")
            return found

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield type and metadata of the events of a watch, until the API server ends it."""
        partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            self._server + path,
            headers={**self._headers, "Accept": partial},
            params={"watch": "true", **query},
            timeout=timeout,
        ) as answer:
            async for line in answer.content:
                event = json.loads(line)
                yield event["type"], event["object"].get("metadata", {})
