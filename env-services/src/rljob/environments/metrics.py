"""Prometheus metrics of an environment service; docs/monitoring.md lists them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

REGISTRY = CollectorRegistry()

SESSIONS = Gauge("rljob_environment_sessions", "Open sessions", registry=REGISTRY)
EPISODES = Counter("rljob_environment_episodes", "Episodes started", registry=REGISTRY)
STEPS = Counter("rljob_environment_steps", "Steps made, without repeated requests", registry=REGISTRY)
REPEATED = Counter("rljob_environment_repeated_requests", "Requests answered with an earlier reply", registry=REGISTRY)
TIMEOUTS = Counter("rljob_environment_timeouts", "Resets and steps that exceeded the time limit", registry=REGISTRY)
FAILURES = Counter(
    "rljob_environment_failures", "Resets and steps that raised or returned something invalid", registry=REGISTRY
)
EXPIRED = Counter("rljob_environment_expired_sessions", "Sessions removed without a request", registry=REGISTRY)
REJECTED = Counter("rljob_environment_rejected_requests", "Requests refused, of lost sessions too", registry=REGISTRY)
