"""Where the operator's benchmark takes place: a control plane, the chart's rights, operators, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import yaml

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
_TICKS = os.sysconf("SC_CLK_TCK")


def camel(name: str) -> str:
    """Return a Python name as JSON has it."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class Place:
    """A control plane of etcd and API server, in which RLJobs are known and the operator has the chart's rights."""

    def __init__(self, plane: ControlPlane, audit: Path) -> None:
        self.plane = plane
        self.audit = AuditLog(audit)
        for found in _chart():
            if found["kind"] != "Deployment":
                plane.api.apply_object(found, "helm")
        self.operator_kubeconfig = plane.service_account_kubeconfig(NAMESPACE, ACCOUNT)

    @property
    def operator_access(self) -> Access:
        """The operator's own credentials: system:masters would pass the API server's queues by."""
        return from_kubeconfig(self.operator_kubeconfig)

    def namespaces(self, names: list[str]) -> None:
        """Make namespaces in which pods can be made without controllers' help."""
        for name in names:
            self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": name}})

    def start_controllers(self) -> None:
        """Start what makes pods, binds them and plays their nodes."""
        for name in LATER:
            self.plane.start(name)


@contextlib.contextmanager
def place(scratch: Path) -> Iterator[Place]:
    """Yield a fresh place; ``scratch`` holds its audit log."""
    scratch.mkdir(parents=True)
    policy, audit = scratch / "policy.yaml", scratch / "audit.log"
    policy.write_text(POLICY.format(user=f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"))
    flags = {
        "apiserver": [f"--audit-policy-file={policy}", f"--audit-log-path={audit}"],
        "controller-manager": ["--concurrent-deployment-syncs=16", "--concurrent-replicaset-syncs=16"],
    }
    with ControlPlane(("etcd", "apiserver"), sorted((ROOT / "crds").glob("*.yaml")), flags) as plane:
        plane.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        plane.install([ROOT / "e2e" / "cluster" / "storage-class.yaml"])
        assert plane.api.exists(f"/apis/storage.k8s.io/v1/storageclasses/{STORAGE_CLASS}")
        yield Place(plane, audit)


def _chart() -> list[dict[str, Any]]:
    command = [str(build.ensure("helm") / "helm"), "template", "rljob", str(ROOT / "charts" / "rljob")]
    done = subprocess.run(
        [*command, "--namespace", NAMESPACE, "--kube-version", "1.36.0"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"helm template failed: {done.stderr}")
    return [found for found in yaml.safe_load_all(done.stdout) if found]


class OperatorProcess:
    """An operator as it runs in a pod, but outside of one."""

    def __init__(self, where: Place, scratch: Path, identity: str) -> None:
        self.port = free_port("127.0.0.1")
        settings = {
            "cluster": {camel(key): value for key, value in asdict(CLUSTER).items()},
            "workers": WORKERS,
            "listen": f"127.0.0.1:{self.port}",
            "lease": {"name": ACCOUNT, "durationSeconds": 15},
        }
        config = scratch / f"{identity}.json"
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "rljob.operator.main", "--config", str(config)]
        command += ["--kubeconfig", str(where.operator_kubeconfig)]
        environment = dict(os.environ) | {"POD_NAME": identity, "POD_NAMESPACE": NAMESPACE}
        self.process = Process(identity, command, scratch / f"{identity}.log", environment)
        self.peak = 0.0
        """The most memory it ever held, in MiB, once it was stopped."""

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024

    def stop(self) -> None:
        """Tell it to end, as Kubernetes does, and wait until it has."""
        if not self.running():
            return
        self.peak = self._peak_mib()
        os.kill(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.running():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator did not end:\n{tail(self.process.log)}")
            time.sleep(0.02)

    def running(self) -> bool:
        """Return whether it has not ended."""
        try:
            self.process.check()
        except RuntimeError:
            return False
        return True

    async def metrics(self) -> dict[str, float]:
        """Return its metrics: name with labels → value."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def at_work(self, where: Place, seconds: float = 60.0) -> None:
        """Wait until it holds the Lease."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{ACCOUNT}"
        deadline = time.monotonic() + seconds
        while True:
            self.process.check()
            lease = where.plane.api.get_or_none(path) or {}
            if self.process.name in (lease.get("spec", {}).get("holderIdentity") or ""):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator does not hold the Lease:\n{tail(self.process.log)}")
            await asyncio.sleep(0.1)


class RefusedError(Exception):
    """The API server refused what the script wanted; ``code`` is HTTP's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Script:
    """What people and coordinators do in the benchmark, as administrator or in somebody's name."""

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
        """Do a request; ``kind`` of a patch: merge-patch+json, apply-patch+yaml; ``user``: in whose name."""
        headers = {**self._headers, "Content-Type": f"application/{kind}"}
        if user:
            headers["Impersonate-User"] = user
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._server + path, data=data, headers=headers, params=query
        ) as answer:
            found = await answer.json(content_type=None)
            if answer.status >= 400:
                raise RefusedError(answer.status, f"{method} {path}: {answer.status} {found.get('message')}")
            return found

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Yield the types of a watch's events; of objects only the metadata is sent."""
        partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            self._server + path,
            headers={**self._headers, "Accept": partial},
            params={"watch": "true", **query},
            timeout=timeout,
        ) as answer:
            async for line in answer.content:
                yield json.loads(line)["type"]
