"""Prometheus metrics of the coordinator. A test freezes the names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from rljob.api.job_status import State
from rljob.coordinator.status_report import state_of
from rljob.scheduling.groups import REJECTED

if TYPE_CHECKING:
    from rljob.coordinator.run import Run
    from rljob.protocol.connection_limits import OpenConnections

REGISTRY = CollectorRegistry()

REFUSED = Counter(
    "rljob_rejected_messages", "Messages rejected: bad token, bad frame, old incarnation", ["role"], registry=REGISTRY
)

API_REQUESTS = Counter(
    "rljob_api_requests", "Requests to the Kubernetes API; code error: no answer", ["verb", "code"], registry=REGISTRY
)


STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Upper bounds of the buckets of staleness."""


def gauge_name(metric: str) -> str:
    """Return the name of the gauge of a step metric: ``rljob_step_reward_mean`` for ``reward/mean``."""
    return f"rljob_step_{re.sub('[^a-zA-Z0-9_]', '_', metric)}"


class ConnectionCollector:
    """Collects the number of connections that the server refused."""

    def __init__(self, connections: OpenConnections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        refused = CounterMetricFamily("rljob_refused_connections", "Connections refused since start", labels=["reason"])
        for reason, count in self._connections.refused.items():
            refused.add_metric([reason], count)
        yield refused


class RunCollector:
    """Collects metrics from the state of the run at each scrape."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and counters of the run."""
        run = self._run
        state = GaugeMetricFamily("rljob_run_state", "1 for the state of the run, 0 for the others", labels=["state"])
        present = state_of(run)
        for name in get_args(State):
            state.add_metric([name], name == present)
        yield state
        yield GaugeMetricFamily("rljob_policy_version", "Batches applied", value=run.version)
        yield GaugeMetricFamily("rljob_training_steps", "Batches of the whole run", value=run.spec.training.steps)
        yield GaugeMetricFamily("rljob_lineage", "Lineage of the published policy", value=run.weights.lineage)
        yield GaugeMetricFamily(
            "rljob_trainer_incarnation", "Trainer processes so far", value=run.trainer.session.incarnation
        )
        yield GaugeMetricFamily("rljob_engines", "Connected engines", value=len(run.engines.connected()))
        yield CounterMetricFamily(
            "rljob_generated_tokens", "Tokens recorded since start", value=run.trajectories.generated_tokens
        )
        crashes = CounterMetricFamily(
            "rljob_engine_crashes", "Engine servers that crashed since start", labels=["pool"]
        )
        for pool in run.spec.policy_pools:
            crashes.add_metric([pool.name], run.engines.crashes[pool.name])
        yield crashes
        spent = CounterMetricFamily(
            "rljob_engine_seconds", "Seconds of engines by activity since start", labels=["engine", "activity"]
        )
        for account in run.progress.engines.accounts:
            for activity, seconds in run.progress.engines.decided_seconds([account]).items():
                spent.add_metric([account.name, activity], seconds)
        yield spent
        yield CounterMetricFamily("rljob_samples_trained", "Samples that were trained", value=run.ends["trained"])
        ended = CounterMetricFamily("rljob_samples_discarded", "Samples that were not trained", labels=["reason"])
        for end in REJECTED:
            ended.add_metric([end], run.ends[end])
        yield ended
        events = CounterMetricFamily(
            "rljob_events", "Rejections, evictions, aborts and requeues since start", labels=["event", "reason"]
        )
        for (event, reason), count in run.progress.events.counts().items():
            events.add_metric([event, reason], count)
        yield events
        yield self._staleness()
        samples = GaugeMetricFamily("rljob_samples", "Samples by state", labels=["state"])
        groups = GaugeMetricFamily("rljob_groups", "Groups by state", labels=["state"])
        for name, value in run.counts().items():
            family = groups if name.startswith("groups_") else samples
            family.add_metric([name.removeprefix("groups_")], value)
        yield from (samples, groups)
        loads = GaugeMetricFamily("rljob_role_load", "Load of a role, for autoscaling", labels=["role"])
        for each in run.loads.all():
            loads.add_metric([each.role], each.load)
        yield loads
        for name, value in run.progress.summary().items():
            yield GaugeMetricFamily(gauge_name(name), f"{name} of the last step", value=value)
        accuracy = GaugeMetricFamily("rljob_accuracy", "Held-out accuracy, newest evaluation", labels=["task"])
        rates = GaugeMetricFamily("rljob_pass_at", "Held-out pass@k, newest evaluation", labels=["task", "k"])
        for task, result in {result.task: result for result in run.evaluations.results}.items():
            accuracy.add_metric([task], result.accuracy)
            for rate in result.pass_at:
                rates.add_metric([task, str(rate.k)], rate.value)
        yield from (accuracy, rates)

    def _staleness(self) -> Metric:
        counts = self._run.progress.staleness
        buckets = [(str(float(bound)), sum(n for age, n in counts.items() if age <= bound)) for bound in STALENESS]
        total = counts.total()
        family = HistogramMetricFamily("rljob_trained_staleness", "Staleness of trained samples")
        family.add_metric([], [*buckets, ("+Inf", total)], sum(age * n for age, n in counts.items()))
        return family
