"""Reads and changes the objects of one namespace for asynchronous tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from e2e.integration.operators import SECONDS, Object, running_operator
from rljob.manifests.names import RENDERED_HASH
from rljob.operator.object_kinds import BY_KEY, CHILDREN, PODS, RLJOBS, SECRETS
from tools.cluster.controlplane import ControlPlane


class NamespaceClient:
    """The objects of one namespace: create, read, patch, delete, and wait for a state."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self.cluster, self.name = cluster, namespace

    async def create(self, body: Object) -> Object:
        return await asyncio.to_thread(self.cluster.api.create, body)

    def path(self, kind: str, name: str = "", subresource: str = "") -> str:
        resource = {"RLJob": RLJOBS, "Pod": PODS, "Secret": SECRETS, **BY_KEY}[kind]
        return resource.path(self.name, name, subresource)

    async def get(self, kind: str, name: str) -> Object | None:
        return await asyncio.to_thread(self.cluster.api.get_or_none, self.path(kind, name))

    async def list(self, kind: str) -> list[Object]:
        return await asyncio.to_thread(self.cluster.api.list, self.path(kind))

    async def patch(self, kind: str, name: str, body: Object, how: str = "merge", subresource: str = "") -> Object:
        return await asyncio.to_thread(self.cluster.api.patch, self.path(kind, name, subresource), body, how)

    async def delete(self, kind: str, name: str) -> None:
        await asyncio.to_thread(self.cluster.api.delete, self.path(kind, name))

    async def until(self, what: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Return the first true value of ``what``, a coroutine function."""
        deadline = time.monotonic() + seconds
        while not (value := await what()):
            assert time.monotonic() < deadline, (
                f"not reached in {seconds:.0f} s: {what.__qualname__}: {await self.conditions()}"
            )
            await asyncio.sleep(0.1)
        return value

    async def conditions(self) -> Any:
        """Return the conditions of all jobs, for an assertion message."""
        return [
            (body["metadata"]["name"], each["type"], each["status"], each["reason"], each["message"])
            for body in await self.list("RLJob")
            for each in body.get("status", {}).get("conditions", ())
        ]

    async def status(self, name: str = "sums") -> Object:
        return ((await self.get("RLJob", name)) or {}).get("status", {})

    async def ready_reason(self, name: str = "sums") -> tuple[str, str]:
        for each in (await self.status(name)).get("conditions", ()):
            if each["type"] == "Ready":
                return each["reason"], each["message"]
        return "", ""

    async def wait_until_ready(self, name: str = "sums", seconds: float = SECONDS) -> None:
        """Return when all roles of a job are ready."""

        async def all_ready() -> bool:
            roles = (await self.status(name)).get("roles", ())
            return bool(roles) and all(role["ready"] == role["desired"] > 0 for role in roles)

        await self.until(all_ready, seconds)

    async def rendered_state(self, name: str = "sums") -> dict[str, Any]:
        """Return the child objects and status of a job without values that differ from run to run."""
        found: dict[str, Any] = {}
        for resource in CHILDREN:
            for body in await self.list(resource.kind):
                meta = body["metadata"]
                if meta.get("labels", {}).get("rljob.dev/job") == name and "deletionTimestamp" not in meta:
                    marks = {key: value for key, value in meta["annotations"].items() if "rljob.dev" in key}
                    marks.pop(RENDERED_HASH)  # it depends on the uid of the owner
                    replicas = body["spec"].get("replicas") if "spec" in body else None
                    found[f"{resource.kind}/{meta['name']}"] = (marks, replicas)
        secrets = [body for body in await self.list("Secret") if body["metadata"]["name"].startswith(f"{name}-tokens-")]
        status = await self.status(name)
        found["secrets"] = len(secrets)
        found["attempt"] = status.get("trainer", {}).get("number")
        found["roles"] = [(role["name"], role["ready"], role["desired"]) for role in status.get("roles", ())]
        found["ready"] = await self.ready_reason(name)
        return found

    async def uids(self, kind: str) -> dict[str, str]:
        return {body["metadata"]["name"]: body["metadata"]["uid"] for body in await self.list(kind)}

    async def drop_lease(self) -> None:
        """Delete the lease, so that the next operator becomes leader at once after the previous one was killed."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.name}/leases/rljob-operator"
        await asyncio.to_thread(self.cluster.api.delete, path)

    def operator(self, **options: Any) -> Any:
        return running_operator(self.cluster.kubeconfig, [self.name], **options)
