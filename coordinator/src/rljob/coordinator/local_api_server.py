"""The coordinator's second HTTP server in a cluster: for users, on the loopback interface of its pod.

Kubernetes RBAC decides who may read prompts, responses and weights: only port forwarding reaches the loopback interface
of the pod. The components of the job and Prometheus use the first server (:mod:`rljob.coordinator.routes`).
"""

from __future__ import annotations

import logging
import socket

from fastapi import FastAPI

from rljob.coordinator.ledger_api import add_ledger_api
from rljob.coordinator.routes import add_status
from rljob.coordinator.run import Run
from rljob.protocol.http_server import HttpServer

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def build_local_api(run: Run) -> FastAPI:
    """Return the application: /v1/status and the ledger API."""
    app = FastAPI(title="rljob coordinator, local API", docs_url=None, redoc_url=None, openapi_url=None)
    add_status(app, run)
    add_ledger_api(app, run.ledger.directory)
    return app


class LocalApiServer(HttpServer):
    """The second server. The first server handles signals."""

    def __init__(self, run: Run) -> None:
        super().__init__(build_local_api(run), signals=False, log_level="warning")

    async def listen(self, port: int) -> None:
        """Serve until ``should_exit`` is set. If the port is not available, log the error and return: the run
        continues."""
        try:
            listener = socket.create_server((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            problem = "the local API is not available: cannot listen on port %d of %s: %s; the run continues"
            log.error(problem, port, LOOPBACK, error)
            return
        await self.serve([listener])
