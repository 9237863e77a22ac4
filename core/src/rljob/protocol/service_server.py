"""The server of a service that the runner calls: a reward or an environment. It logs when it serves and why it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

from rljob.api.text_escape import escape_block
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.environment import LOG_LEVEL
from rljob.protocol.http_server import HttpServer, token_check
from rljob.protocol.startup import host_and_port

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20
"""Maximum time to finish received requests after SIGTERM in a pod; the pod's grace period is longer. On one machine the
service does not wait: the runner sends these requests again after the next start."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONNECTIONS = 1024
"""Open connections without a token: runners of a service with url have none."""


def start_logging(level: str = "INFO") -> None:
    """Log to standard error, from ``level`` on if the variable of the level is not set. Control characters, which a
    peer's names or the code of a user may hold, are escaped: a user who starts a service sees its log in a terminal."""
    handler = logging.StreamHandler()
    handler.setFormatter(_EscapingFormatter(_LOG_FORMAT))
    logging.basicConfig(level=os.environ.get(LOG_LEVEL, level), handlers=[handler])


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_block(super().format(record))


class ServiceServer(HttpServer):
    """Logs when it serves and why it ends.

    Args:
        app: ASGI application.
        listen: HOST:PORT.
        token: that requests send as bearer token; empty: none.
        body_bytes: longest body of a request.
        idle_seconds: between two requests of a connection.
    """

    signal = ""

    def __init__(self, app: Any, listen: str, token: str, body_bytes: int, idle_seconds: int = 5) -> None:
        host, port = host_and_port(listen)
        super().__init__(
            app,
            HttpLimits(body_bytes=body_bytes, connections=CONNECTIONS, idle_seconds=idle_seconds),
            token_check([token] if token else []),
            host=host,
            port=int(port),
            loop="uvloop",
            log_config=None,
            log_level="warning",  # the end of the log is part of the message when a service ends a run
            timeout_graceful_shutdown=DRAIN_SECONDS if os.environ.get("RLJOB_INSTANCE") else 1,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self.started:
            log.info("serving at %s:%d", self.config.host or "*", self.config.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what was received."""
        log.info("received %s; finishing the requests received before it", self.signal)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Remember the signal that ends the server."""
        self.signal = signal.Signals(sig).name
        super().handle_exit(sig, frame)

    def serve_until_signal(self) -> None:
        """Serve until SIGTERM or Ctrl-C; exit with code 1 if the address cannot be used."""
        # uvicorn has its own handler while it serves and raises the signal again afterwards; then exit with code 0.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C in a terminal
            self.run()
        if not self.started:
            sys.exit(1)
