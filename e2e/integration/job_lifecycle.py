"""A job in a namespace of a real API server. The test acts as its user and as its coordinator."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from e2e.integration.operators import SECONDS, Object, job
from rljob.manifests.inputs import Cluster
from tools.cluster.client import API, VERSIONS
from tools.cluster.controlplane import ControlPlane

GPUS = Cluster(accelerator="nvidia", access_modes=("ReadWriteOnce",), requests_per_gpu={"cpu": "0.01", "memory": "1Mi"})
"""Settings of a cluster with accelerators."""


class JobClient:
    """One job: the actions of its user and of its coordinator, and the queries of a test."""

    def __init__(self, cluster: ControlPlane, namespace: str, name: str = "sums") -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    # --- actions of a user ---

    async def apply(self, **spec: Any) -> None:
        """Apply the job's manifest with kubectl."""
        body = job(self.namespace, self.name, **spec)
        await self.kubectl("apply", "-f", "-", "--server-side", stdin=json.dumps(body))

    async def change(self, **spec: Any) -> None:
        """Change fields of the spec."""
        await asyncio.to_thread(self.cluster.api.patch, self._path("RLJob", self.name), {"spec": spec})

    async def delete(self) -> None:
        """Delete the job."""
        await asyncio.to_thread(self.cluster.api.delete, self._path("RLJob", self.name))

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return await asyncio.to_thread(self.cluster.kubectl, "-n", self.namespace, *arguments, stdin=stdin)

    # --- actions of a coordinator ---

    async def apply_run(self, state: str, **run: Any) -> None:
        """Apply status.run, as the coordinator does."""
        body = await self.body()
        run_status = {"state": state, "observedGeneration": body["metadata"]["generation"], **run}
        status = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": self.name}, "status": {"run": run_status}}
        path = f"{self._path('RLJob', self.name)}/status"
        await asyncio.to_thread(self.cluster.api.apply, path, status, "rljob-coordinator")

    async def run_up(self, **spec: Any) -> None:
        """Apply the job and wait until it is Running."""
        await self.apply(**spec)
        await self.ready_pods()
        await self.apply_run("Running")
        await self.reason("Running")

    # --- queries of a test ---

    async def body(self) -> Object:
        """Return the RLJob."""
        return await asyncio.to_thread(self.cluster.api.get, self._path("RLJob", self.name))

    async def status(self) -> Object:
        """Return the status of the RLJob."""
        found: Object = (await self.body()).get("status", {})
        return found

    async def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition; empty texts when there is none."""
        found = next((each for each in (await self.status()).get("conditions", ()) if each["type"] == kind), None)
        return (found["status"], found["reason"], found.get("message", "")) if found else ("", "", "")

    async def role(self, name: str) -> Object:
        """Return the status of a role."""
        return next((role for role in (await self.status()).get("roles", ()) if role["name"] == name), {})

    async def children(self, kind: str) -> dict[str, Object]:
        """Return the job's objects of a kind by name, without those that are being deleted."""
        path = self._path(kind)
        selector = f"rljob.dev/job={self.name}"
        items = await asyncio.to_thread(self.cluster.api.list, path, labelSelector=selector)
        return {each["metadata"]["name"]: each for each in items if "deletionTimestamp" not in each["metadata"]}

    async def pods(self, role: str = "") -> list[Object]:
        """Return the job's pods, or those of a role, sorted by name, without those that are being deleted."""
        found = (await self.children("Pod")).values()
        return sorted(
            (pod for pod in found if role in ("", pod["metadata"]["labels"]["rljob.dev/role"])),
            key=lambda pod: str(pod["metadata"]["name"]),
        )

    async def any_pod(self, role: str) -> str:
        """Return the name of a pod of a role."""
        return str((await self.pods(role))[0]["metadata"]["name"])

    async def until(self, what: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Return the first true value of the coroutine function ``what``."""
        deadline = time.monotonic() + seconds
        while not (value := await what()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not reached; the job: {json.dumps(await self.status(), indent=1)}")
            await asyncio.sleep(0.1)
        return value

    async def reason(self, reason: str, kind: str = "Ready", seconds: float = SECONDS) -> str:
        """Wait until a condition has ``reason``; return its message."""

        async def has() -> bool:
            return (await self.condition(kind))[1] == reason

        await self.until(has, seconds)
        return (await self.condition(kind))[2]

    async def says(self, text: str) -> None:
        """Wait until the message of the condition Ready contains ``text``."""

        async def contains() -> bool:
            return text in (await self.condition("Ready"))[2]

        await self.until(contains)

    async def ready_pods(self) -> None:
        """Wait until every role has all desired pods ready."""

        async def all_ready() -> bool:
            roles = (await self.status()).get("roles", ())
            return bool(roles) and all(role["ready"] == role["desired"] > 0 for role in roles)

        await self.until(all_ready)

    async def no_pods(self, *but: str) -> None:
        """Wait until there are no pods except those of the roles ``but``."""

        async def gone() -> bool:
            return all(pod["metadata"]["labels"]["rljob.dev/role"] in but for pod in await self.pods())

        await self.until(gone)

    async def attempt(self, number: int) -> Object:
        """Wait until the trainer's attempt ``number`` is ready; return ``status.trainer``."""

        async def ready_attempt() -> Object | None:
            status = await self.status()
            found: Object = status.get("trainer", {})
            trainer = next((role for role in status["roles"] if role["name"] == "trainer"), {"ready": 0, "desired": 1})
            return found if found.get("number") == number and trainer["ready"] == trainer["desired"] else None

        found: Object = await self.until(ready_attempt)
        return found

    async def events(self) -> list[str]:
        """Return the reasons of the events about the job, oldest first."""
        found = await asyncio.to_thread(self.cluster.api.events, self.namespace, self.name)
        return [event["reason"] for event in found]

    def _path(self, kind: str, name: str | None = None) -> str:
        return self.cluster.api.path(VERSIONS.get(kind, "v1"), kind, self.namespace, name)
