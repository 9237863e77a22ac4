"""Imports all components, with the times that the fault matrix waits for at most a tenth of those in production.

The process that forks the components imports this module (see :mod:`e2e.fakes.fork_server`).
"""

from __future__ import annotations

from e2e.faults.cases import PING_SECONDS
from rljob.coordinator import message_router, weight_publisher
from rljob.protocol import coordinator_link, heartbeat
from rljob.runner import circuit_breaker, scoring

coordinator_link.PING_SECONDS = PING_SECONDS
coordinator_link.LAST_BACKOFF_SECONDS = 0.1
message_router.RECONNECT_SECONDS = 0.2
weight_publisher.GRACE_SECONDS = 0.5
scoring.FIRST_BACKOFF_SECONDS, scoring.LAST_BACKOFF_SECONDS = 0.02, 0.1
circuit_breaker.FIRST_OPEN_SECONDS, circuit_breaker.LAST_OPEN_SECONDS = 0.02, 0.1
heartbeat.BEAT_SECONDS = 0.1
