"""A reward under real load goes from one pod to three and back: by the built-in autoscaler, then by an HPA."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.tests.certificates import certificate
from e2e.pods.full.test_rewards_of_users import START_SECONDS, check_samples
from e2e.pods.job import IDLE_RESOURCES, RESTRICTED, SMALL_MODEL, Job, quickstart
from tools.cluster.client import Object
from tools.cluster.node import Cluster

ROLE, MOST, TARGET = "reward-slow", 3, 20
OUT_SECONDS, IN_SECONDS = 5, 20
SCALE_SECONDS = 240.0
QUIET_SECONDS = 30.0
REWARD = """
import http.server, json, pathlib, time

fast = pathlib.Path("/state/fast")

class Reward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        if not fast.exists():
            time.sleep(4)
        scores = [{"sample": item["sample"], "reward": float(len(item["completion"]) % 2)} for item in items]
        self.answer({"scores": scores})

    def do_GET(self):
        self.answer({})

    def answer(self, reply):
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("", 8080), Reward).serve_forever()
"""
"""Scores after four seconds, so that many samples wait, or at once while the file ``fast`` exists."""
ADAPTER = """
import datetime, http.server, json, re, ssl, sys, urllib.request

class Adapter(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if "/namespaces/" in self.path:
            text = urllib.request.urlopen(sys.argv[1], timeout=5).read().decode()
            load = re.search(r'^rljob_role_load\\{.*role="reward-slow".*\\} (\\S+)$', text, re.MULTILINE)[1]
            now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            value = {"timestamp": now, "value": str(int(float(load)))}
            item = {"metricName": "rljob_role_load", "metricLabels": {}, **value}
            answer = {"kind": "ExternalMetricValueList", "metadata": {}, "items": [item]}
        else:
            answer = {"kind": "APIResourceList", "groupVersion": "external.metrics.k8s.io/v1beta1", "resources": []}
        version = "v1" if answer["kind"] == "APIResourceList" else "external.metrics.k8s.io/v1beta1"
        body = json.dumps({"apiVersion": version, **answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("", 8443), Adapter)
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain("/tls/tls.crt", "/tls/tls.key")
server.socket = tls.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
"""A double of a metrics adapter: it passes the load of the reward, as the coordinator serves it, to the API server."""

pytestmark = pytest.mark.timeout(1800)


def manifest(image: str) -> Object:
    """Return the quickstart with a slow reward of the user's own."""
    spec = quickstart()["spec"]
    main = {
        "name": "main",
        "image": image,
        "command": ["python", "-c", REWARD],
        "resources": IDLE_RESOURCES,
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
    }
    slow = {
        "name": "slow",
        "template": {"spec": {"containers": [main], "volumes": [{"name": "state", "emptyDir": {}}]}},
        "timeoutSeconds": 60,
        "replicas": {"min": 1, "max": MOST},
        "autoscaling": {"targetInFlight": TARGET, "scaleOutSeconds": OUT_SECONDS, "scaleInSeconds": IN_SECONDS},
    }
    body = quickstart(
        initializer=SMALL_MODEL,
        training=spec["training"] | {"steps": 2000, "promptsPerStep": 8, "maxStaleness": 2},
        evaluation=None,
        tasks=[spec["tasks"][0] | {"reward": "slow"}],
        rewards=[slow],
        network={"allowFrom": [{"name": "adapter", "podLabels": {"app": "adapter"}}]},
    )
    body["metadata"]["name"] = "autoscaled"
    return body


@pytest.fixture(scope="module")
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    """The job, from its beginning to its end."""
    found = Job(node, node.namespace("autoscaled", RESTRICTED), manifest(installed.images["rewards"]))
    found.apply()
    yield found
    node.api.delete(f"/api/v1/namespaces/{found.namespace}")


@pytest.fixture(scope="module")
def adapter(node: Cluster, installed: Any, job: Job, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A double of a metrics adapter in a pod, registered with the API server."""
    crt, key = certificate(tmp_path_factory.mktemp("adapter") / "tls", "DNS:adapter")
    objects = adapter_objects(job, installed.images["rewards"], Path(crt), Path(key))
    job.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    name = "v1beta1.external.metrics.k8s.io"
    node.api.wait_condition(f"/apis/apiregistration.k8s.io/v1/apiservices/{name}", "Available", seconds=120)
    yield
    node.api.delete(f"/apis/apiregistration.k8s.io/v1/apiservices/{name}")


def adapter_objects(job: Job, image: str, crt: Path, key: Path) -> list[Object]:
    """Return the objects of the adapter."""
    data = {name: base64.b64encode(path.read_bytes()).decode() for name, path in (("tls.crt", crt), ("tls.key", key))}
    url = f"http://{job.name}-coordinator.{job.namespace}.svc.cluster.local:8080/metrics"
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", ADAPTER, url],
        "resources": IDLE_RESOURCES,
        "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
    }
    spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tls", "secret": {"secretName": "adapter"}}],
    }
    service = {"namespace": job.namespace, "name": "adapter", "port": 443}
    registration = {"group": "external.metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": True}
    registration |= {"groupPriorityMinimum": 100, "versionPriority": 100}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "adapter"}, "data": data},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "adapter", "labels": {"app": "adapter"}},
            "spec": spec,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "adapter"},
            "spec": {"selector": {"app": "adapter"}, "ports": [{"port": 443, "targetPort": 8443}]},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
            "spec": {"service": service, **registration},
        },
    ]


def hpa(job: Job) -> Object:
    """Return an HPA of the reward with the windows of the built-in autoscaler."""
    external = {"metric": {"name": "rljob_role_load"}, "target": {"type": "AverageValue", "averageValue": str(TARGET)}}
    out, back = ({"stabilizationWindowSeconds": seconds} for seconds in (OUT_SECONDS, IN_SECONDS))
    reference = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJobScale", "name": f"{job.name}-{ROLE}"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": ROLE},
        "spec": {
            "scaleTargetRef": reference,
            "minReplicas": 1,
            "maxReplicas": MOST,
            "metrics": [{"type": "External", "external": external}],
            "behavior": {"scaleUp": out, "scaleDown": back},
        },
    }


def set_fast(job: Job, fast: bool) -> None:
    """Let all pods of the reward score at once, or slowly."""
    command = ["touch", "/state/fast"] if fast else ["rm", "-f", "/state/fast"]
    for pod in job.pods(ROLE):
        job.kubectl("exec", pod["metadata"]["name"], "--", *command)


def stays(job: Job, count: int) -> None:
    """Check that nothing changes for a while: no flapping."""
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        assert len(job.pods(ROLE)) == count
        time.sleep(1)


def scalings(job: Job) -> list[str]:
    """Return the decisions of the built-in autoscaler, by their events."""
    found = job.node.api.events(job.namespace, job.name)
    return [event["reason"] for event in found if event["reason"] in ("ScaledOut", "ScaledIn")]


def goes_out_and_in_again(job: Job) -> None:
    """Check that the reward has all pods under load, works with them, and has one when the load ends."""
    job.has_pods(ROLE, MOST, SCALE_SECONDS)
    stays(job, MOST)
    job.reaches(job.step() + 2, SCALE_SECONDS)
    set_fast(job, True)
    job.has_pods(ROLE, 1, SCALE_SECONDS)
    stays(job, 1)
    check_samples(job)


def test_the_built_in_autoscaler_scales_out_under_load_and_in_again(job: Job) -> None:
    job.reaches(1, START_SECONDS)
    goes_out_and_in_again(job)
    assert set(scalings(job)) == {"ScaledOut", "ScaledIn"}


def test_an_hpa_scales_it_by_the_same_load_and_the_operator_keeps_off(job: Job, adapter: None) -> None:
    job.scale(ROLE, 2)  # ends the built-in autoscaler, which would be faster than the HPA's 15 s
    job.has_pods(ROLE, 2, SCALE_SECONDS)
    decisions = scalings(job)
    job.kubectl("apply", "-f", "-", stdin=json.dumps(hpa(job)))
    set_fast(job, False)
    goes_out_and_in_again(job)
    assert scalings(job) == decisions


def test_no_work_was_lost(job: Job) -> None:
    report = job.audit()
    assert report["ok"], report
