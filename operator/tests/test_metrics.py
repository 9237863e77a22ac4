"""Names of metrics are frozen: dashboards and alerts use them."""

from prometheus_client import generate_latest

from rljob.operator.metrics import Metrics

NAMES = {
    "rljob_operator_api_requests": ("verb", "code"),
    "rljob_operator_cached_objects": ("resource",),
    "rljob_operator_desired_replicas": ("role",),
    "rljob_operator_event_loop_lag_seconds": (),
    "rljob_operator_events_dropped": (),
    "rljob_operator_jobs": ("condition", "status"),
    "rljob_operator_kubernetes_supported": ("version",),
    "rljob_operator_leader": (),
    "rljob_operator_queue_depth": (),
    "rljob_operator_queue_wait_seconds": (),
    "rljob_operator_reconcile_seconds": ("result",),
    "rljob_operator_scalings": ("reason",),
    "rljob_operator_watch_age_seconds": ("resource",),
    "rljob_operator_watch_restarts": ("resource", "reason"),
}


def metrics():
    made = Metrics()
    conditions = [("Ready", "True"), ("Ready", "True")]
    made.at_scrape(lambda: conditions, lambda: {"pods": 3}, lambda: {"pods": 1.5}, lambda: {"runner": 2})
    return made


def test_names_and_labels_of_the_metrics_are_frozen():
    made = metrics()
    made.count_request("get", "200")
    made.watch_restarts.labels("pods", "gone").inc()
    made.scalings.labels("ScaledOut").inc()
    made.kubernetes_supported.labels("v1.36.3").set(1)
    made.reconcile_seconds.labels("done").observe(0.1)
    labels = {family.name: set() for family in made.registry.collect()}
    for family in made.registry.collect():
        for sample in family.samples:
            labels[family.name] |= set(sample.labels) - {"le"}
    assert labels == {name: set(of) for name, of in NAMES.items()}


def test_jobs_are_counted_by_condition_without_names():
    text = generate_latest(metrics().registry).decode()
    assert 'rljob_operator_jobs{condition="Ready",status="True"} 2.0' in text


def test_desired_pods_are_counted_by_kind_of_role():
    text = generate_latest(metrics().registry).decode()
    assert 'rljob_operator_desired_replicas{role="runner"} 2.0' in text
