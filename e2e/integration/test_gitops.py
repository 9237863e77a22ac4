"""Argo CD and Flux: the health rules of docs/operations/gitops.md on statuses that an operator wrote.

Neither tool is run. The rule for Argo CD is run by a Lua interpreter, kstatus (Flux) is a few lines here.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.docs.blocks import blocks
from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import job, running_operator
from e2e.system_packages import require_packages
from tools.cluster.controlplane import ControlPlane

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations/gitops.md"
KEY = "resource.customizations.health.rljob.dev_RLJob"
LUA = "lua5.4"


@pytest.fixture(scope="module")
def rule() -> Iterator[str]:
    """The rule of the page; skips the test without a Lua interpreter, which root installs."""
    require_packages("gitops")
    [text] = [block.text for block in blocks(PAGE) if block.file == "argocd-cm.yaml"]
    yield yaml.safe_load(text)["data"][KEY]


def lua(value: Any) -> str:
    """Return a value of JSON as an expression of Lua."""
    match value:
        case dict():
            return f"{{{', '.join(f'[{lua(key)}] = {lua(each)}' for key, each in value.items())}}}"
        case list():
            return f"{{{', '.join(map(lua, value))}}}"
        case bool():
            return str(value).lower()
        case None:
            return "nil"
        case str():
            return '"' + "".join("\\" + f"{byte:03}" for byte in value.encode()) + '"'
        case _:
            return str(value)


def argo_health(rule: str, obj: dict[str, Any]) -> tuple[str, str]:
    """Return status and message that the rule computes for an object, as Argo CD runs it: ``obj`` is global."""
    program = f'obj = {lua(obj)}\nhs = (function() {rule} end)()\nio.write(hs.status, "\\n", hs.message)'
    done = subprocess.run([LUA, "-"], input=program, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    status, _, message = done.stdout.partition("\n")
    return status, message


def kstatus(obj: dict[str, Any]) -> str:
    """Return the state that kstatus computes.

    Source: sigs.k8s.io/cli-utils/pkg/kstatus/status/generic.go, checkGenericProperties and checkReadyCondition.
    """
    status = obj.get("status", {})
    if status.get("observedGeneration", obj["metadata"]["generation"]) != obj["metadata"]["generation"]:
        return "InProgress"
    found = {each["type"]: each["status"] for each in status.get("conditions", ())}
    if found.get("Stalled") == "True":
        return "Failed"
    return {"True": "Current", "False": "InProgress"}.get(found.get("Ready", ""), "Unknown")


async def test_both_tools_see_each_state_of_a_job(cluster: ControlPlane, namespace: str, rule: str):
    client = JobClient(cluster, namespace)

    async def seen() -> tuple[str, str]:
        body = await client.body()
        return (await asyncio.to_thread(argo_health, rule, body))[0], kstatus(body)

    await client.apply()
    assert (await seen())[0] == "Progressing"  # no operator has seen it
    async with running_operator(cluster.kubeconfig, [namespace]):
        await client.reason("Starting")
        assert await seen() == ("Progressing", "InProgress")
        await client.apply_run("Running")
        await client.reason("Running")
        assert await seen() == ("Healthy", "Current")
        await client.change(suspend=True, suspendGraceSeconds=0)
        await client.reason("Suspended")
        assert await seen() == ("Suspended", "InProgress")
        await client.change(suspend=False)
        await client.ready_pods()
        await client.apply_run("Failed", reason="RunFailed", message="the reward is constant")
        await client.reason("RunFailed", "Failed")
        assert await seen() == ("Degraded", "Failed")
        assert await asyncio.to_thread(argo_health, rule, await client.body()) == ("Degraded", "the reward is constant")


async def test_a_job_that_succeeded_stays_healthy(cluster: ControlPlane, namespace: str, rule: str):
    client = JobClient(cluster, namespace)
    async with running_operator(cluster.kubeconfig, [namespace]):
        await client.run_up()
        await client.apply_run("Succeeded")
        await client.reason("Succeeded", "Complete")
        body = await client.body()
    assert argo_health(rule, body)[0] == "Healthy" and kstatus(body) == "Current"


async def test_a_change_is_progressing_until_the_operator_has_seen_it(cluster: ControlPlane, namespace: str, rule: str):
    client = JobClient(cluster, namespace)
    async with running_operator(cluster.kubeconfig, [namespace]):
        await client.run_up()
    await client.change(training={"steps": 9})  # no operator runs
    body = await client.body()
    assert body["status"]["observedGeneration"] < body["metadata"]["generation"]
    assert argo_health(rule, body)[0] == "Progressing" and kstatus(body) == "InProgress"


async def test_a_second_server_side_apply_of_git_changes_nothing(cluster: ControlPlane, namespace: str):
    """The operator, its autoscaler and a coordinator write nothing that a tool with its own field manager applies."""
    client = JobClient(cluster, namespace)
    desired = job(namespace)
    path = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace, "sums")
    cluster.api.apply(path, desired, "argocd-controller", force=False)
    async with running_operator(cluster.kubeconfig, [namespace]) as operator:
        await client.ready_pods()
        await client.apply_run("Running")
        await client.reason("Running")
        await client.kubectl("scale", "rljobscale/sums-rollout-main", "--replicas=4")
        await client.ready_pods()
        await operator.idle()
        before = (await client.body())["metadata"]
        again = await asyncio.to_thread(cluster.api.apply, path, desired, "argocd-controller", False)
    assert again["metadata"]["resourceVersion"] == before["resourceVersion"]
    assert again["metadata"]["generation"] == 1
