"""A double of a metrics adapter: it serves one external metric to the API server, which passes it to HPAs."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from core.tests.certificates import certificate
from tools.cluster.controlplane import ControlPlane

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
PATH = f"/apis/{GROUP}/{VERSION}"


class MetricsDouble:
    """The value of every external metric, and the queries that were made."""

    def __init__(self) -> None:
        self.value = 0
        self.queries: list[str] = []

    def answer(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a request of the API server; None: there is nothing at this path."""
        if path.rstrip("/") == PATH:
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [],
            }
        if not path.startswith(f"{PATH}/namespaces/"):
            return None
        self.queries.append(path)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        item = {"metricName": "rljob_role_load", "metricLabels": {}, "timestamp": now, "value": str(self.value)}
        return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": [item]}


@contextlib.contextmanager
def external_metrics(cluster: ControlPlane, namespace: str, directory: Path) -> Iterator[MetricsDouble]:
    """Serve external metrics in a cluster."""
    double = MetricsDouble()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = double.answer(self.path.partition("?")[0])
            body = json.dumps(answer or {}).encode()
            self.send_response(200 if answer is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate(directory / "metrics", "DNS:localhost"))
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    services = f"/api/v1/namespaces/{namespace}/services"
    port = server.server_address[1]
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    cluster.api.post(services, {"metadata": {"name": "metrics"}, "spec": spec})
    registered = "/apis/apiregistration.k8s.io/v1/apiservices"
    reference = {"namespace": namespace, "name": "metrics", "port": port}
    priorities = {"groupPriorityMinimum": 100, "versionPriority": 100}
    spec = {"group": GROUP, "version": VERSION, "service": reference, "insecureSkipTLSVerify": True, **priorities}
    cluster.api.post(registered, {"metadata": {"name": f"{VERSION}.{GROUP}"}, "spec": spec})
    try:
        cluster.api.wait_condition(f"{registered}/{VERSION}.{GROUP}", "Available")
        yield double
    finally:
        cluster.api.delete(f"{registered}/{VERSION}.{GROUP}")
        server.shutdown()
        server.server_close()
