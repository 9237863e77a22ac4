"""The operator as a process of kopf: `kopf run`, handlers of another module, liveness of a standby, stop."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from e2e.integration.namespace import NamespaceClient
from e2e.integration.operators import OperatorProcess, job
from tools.cluster.controlplane import ControlPlane

RUN = ("kopf", "run", "--standalone", "-m", "rljob.operator.handlers")
HOOKS = """
import kopf, pathlib

@kopf.on.event("rljob.dev", "rljobs")
def seen(event, name, **_):
    with pathlib.Path({path!r}).open("a") as file:
        print(event["type"], name, file=file)
"""


@pytest.fixture
def ns(cluster: ControlPlane, namespace: str) -> NamespaceClient:
    return NamespaceClient(cluster, namespace)


async def test_kopf_runs_the_operator_and_the_handlers_of_another_module(ns: NamespaceClient, tmp_path):
    seen = tmp_path / "seen"
    (tmp_path / "acme_hooks.py").write_text(HOOKS.format(path=str(seen)))
    command = (*RUN, "-n", ns.name)
    with OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path, command, ["acme_hooks"]) as process:
        await process.wait_leader()
        await ns.create(job(ns.name, "first", suspend=True))
        # The operator may lead before kopf has listed the RLJobs: one in the list is no ADDED event.
        await ns.until(lambda: asyncio.to_thread(lambda: seen.exists() and "first" in seen.read_text()))
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        with OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path) as standby:

            async def alive() -> bool:
                return await standby.health() is not None

            await ns.until(alive)
            assert (await standby.health() or {})["leader"] is False
            assert (await process.health() or {})["leader"] is True
            assert await standby.text("/readyz") == "ok\n"
            assert standby.terminate() == 0
        meta = (await ns.get("RLJob", "sums") or {})["metadata"]
        assert "finalizers" not in meta
        assert not [key for key in meta.get("annotations", ()) if "kopf" in key]
        assert not [entry["manager"] for entry in meta["managedFields"] if "kopf" in entry["manager"]]
        await ns.delete("RLJob", "sums")
        await ns.until(lambda: asyncio.to_thread(lambda: "DELETED sums" in seen.read_text()))
        assert "ADDED sums" in seen.read_text()
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.process.wait, 60) == 0, process.log.read_text()[-2000:]
        assert time.monotonic() - began < 10, "the Lease is released at once"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{ns.name}/leases/rljob-operator"
    assert not (await asyncio.to_thread(ns.cluster.api.get, lease))["spec"].get("holderIdentity")
    log = process.log.read_text()
    assert "Traceback" not in log and "Handler 'rljob' succeeded" not in log


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ((*RUN, "-A"), "namespaces: kopf watches other namespaces: run kopf with -n "),
        (("rljob.operator.main", "--config", "/nowhere.json", "--"), "/nowhere.json: the settings cannot be read"),
    ],
)
async def test_wrong_settings_are_one_sentence(ns: NamespaceClient, tmp_path, command, sentence):
    with OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path, command) as process:
        assert await asyncio.to_thread(process.process.wait, 60) == (1 if command[0] == "kopf" else 2)
        assert sentence in process.log.read_text()
