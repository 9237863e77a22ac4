"""The coordinator's second listener, in a cluster: for people, on the loopback of its pod.

Who may read prompts, answers and weights is a matter of Kubernetes' rights: a port that is forwarded enters the pod
here, and nothing else does. What programs of the job and Prometheus need is on the
first (:mod:`rljob.coordinator.routes`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from rljob.coordinator.ledger_api import add_reports
from rljob.coordinator.routes import add_status
from rljob.coordinator.run import Run

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def build_readers_app(run: Run) -> FastAPI:
    """Return the application: /v1/status and the reports."""
    app = FastAPI(title="rljob coordinator, for readers", docs_url=None, redoc_url=None, openapi_url=None)
    add_status(app, run)
    add_reports(app, run.ledger.directory)
    return app


class LocalApiServer(uvicorn.Server):
    """The second listener; signals are the first one's."""

    def __init__(self, run: Run) -> None:
        app = build_readers_app(run)
        super().__init__(
            uvicorn.Config(app, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def listen(self, port: int) -> None:
        """Serve until ``should_exit``; the run continues if the port cannot be used."""
        try:
            listener = socket.create_server((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            log.error("readers cannot ask: port %d of %s cannot be listened on: %s", port, LOOPBACK, error)
            return
        await self.serve([listener])
