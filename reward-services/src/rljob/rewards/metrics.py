"""Prometheus metrics of a reward service; docs/monitoring.md lists them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

SAMPLES = Counter("rljob_reward_samples", "Samples answered, including those with an error", registry=REGISTRY)
SECONDS = Histogram(
    "rljob_reward_seconds",
    "Time of one sample in its worker",
    buckets=(0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000),
    registry=REGISTRY,
)
TIMEOUTS = Counter("rljob_reward_timeouts", "Times that a sample exceeded the time limit", registry=REGISTRY)
CRASHES = Counter("rljob_reward_worker_crashes", "Worker processes that crashed", registry=REGISTRY)
REJECTED = Counter(
    "rljob_reward_rejected_requests", "Requests refused: no token, too large, or malformed", registry=REGISTRY
)
FAILURES = Counter("rljob_reward_failures", "Samples answered with an error, including time-outs", registry=REGISTRY)
ERRORS = Counter("rljob_reward_errors", "Samples that got no score, by kind of error", ["kind"], registry=REGISTRY)
QUEUED = Gauge("rljob_reward_queued_samples", "Samples that wait for a worker", registry=REGISTRY)
IN_FLIGHT = Gauge("rljob_reward_samples_in_flight", "Samples that a worker has", registry=REGISTRY)

ERROR_KINDS = ("raised", "not_scored", "unavailable", "timeout", "unusable", "crash", "other")
for _kind in ERROR_KINDS:
    ERRORS.labels(_kind)  # begins at 0: a rate needs the value before the first error
