"""The admission webhook on a real API server: an invalid RLJob is refused when it is written."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from core.tests.certificates import certificate
from e2e.integration.namespace import NamespaceClient
from e2e.integration.operators import Object, OperatorProcess, job
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

HOOKS = """
import kopf

@kopf.on.validate("rljob.dev", "rljobs", id="acme")
def owned(labels, **_):
    if "team" not in labels:
        raise kopf.AdmissionError("metadata.labels.team: required here", code=403)
"""
HOST = {"template": {"spec": {"hostNetwork": True}}}
SENTENCE = "spec.trainer.template.spec.hostNetwork: governed by rljob; set spec.trainer.hostNetwork instead"


@pytest.fixture
def ns(cluster: ControlPlane, namespace: str) -> NamespaceClient:
    return NamespaceClient(cluster, namespace)


def configuration(namespace: str, url: str, authority: Path, failure_policy: str) -> Object:
    """Return the configuration that the chart renders, with an address of this machine, and one of a user's handler."""

    def webhook(handler: str) -> dict[str, Any]:
        return {
            "name": f"{handler}.rljobs.rljob.dev",
            "rules": [
                {
                    "apiGroups": ["rljob.dev"],
                    "apiVersions": ["v1alpha1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["rljobs"],
                }
            ],
            "clientConfig": {
                "url": f"{url}/{handler}",
                "caBundle": base64.b64encode(authority.read_bytes()).decode(),
            },
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": failure_policy,
            "timeoutSeconds": 10,
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        }

    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"rljob-{namespace}"},
        "webhooks": [webhook("validate"), webhook("acme")],
    }


async def refusal(ns: NamespaceClient, body: Object) -> str:
    """Return why the API server refuses an RLJob; empty if it stores it."""
    try:
        await ns.create(body)
    except ApiError as error:
        return error.message
    return ""


async def test_an_invalid_rljob_is_refused_with_the_sentence_of_its_condition(ns: NamespaceClient, tmp_path: Path):
    (tmp_path / "acme_admission.py").write_text(HOOKS)
    authority, key = certificate(tmp_path / "webhook", "IP:127.0.0.1")
    await ns.create(job(ns.name, "before", trainer=HOST))
    webhook = {"listen": "127.0.0.1:0", "certificate": str(authority), "key": str(key)}
    api = ns.cluster.api
    path = api.path("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration")
    with OperatorProcess(
        ns.cluster.kubeconfig, [ns.name], tmp_path, modules=["acme_admission"], webhook=webhook
    ) as process:
        await process.wait_leader()
        lines = [line for line in process.log.read_text().splitlines() if "serving the webhook at port " in line]
        url = f"https://127.0.0.1:{lines[0].rpartition(' ')[2]}"
        await asyncio.to_thread(api.post, path, configuration(ns.name, url, authority, "Fail"))
        try:
            invalid, valid = job(ns.name, trainer=HOST), job(ns.name)
            for body in (invalid, valid):
                body["metadata"]["labels"] = {"team": "a"}

            async def refused() -> bool:
                return SENTENCE in await refusal(ns, {**invalid, "metadata": {**invalid["metadata"], "name": "probe"}})

            await ns.until(refused)  # the API server reads its configuration after a moment
            denied = await refusal(ns, invalid)
            assert denied == f'admission webhook "validate.rljobs.rljob.dev" denied the request: {SENTENCE}'
            assert (await ns.ready_reason("before")) == ("InvalidSpec", SENTENCE)
            assert await refusal(ns, valid) == ""
            assert "metadata.labels.team: required here" in await refusal(ns, job(ns.name, "other"))
            shared = {"spec": {"trainer": {"template": {"spec": {"shareProcessNamespace": True}}}}}
            with pytest.raises(ApiError, match=r"spec\.trainer\.template\.spec\.shareProcessNamespace: the probes"):
                await ns.patch("RLJob", "sums", shared)
            labels = {"metadata": {"labels": {"team": "a"}}, "spec": {"suspend": True}}
            assert (await ns.patch("RLJob", "before", labels))["spec"]["suspend"] is True
        finally:
            await asyncio.to_thread(api.delete, f"{path}/rljob-{ns.name}")
        assert process.terminate() == 0
    log = process.log.read_text()
    assert "Traceback" not in log and "'validate' failed" not in log
