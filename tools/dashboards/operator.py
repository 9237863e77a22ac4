"""The dashboard of the operator: is there a leader, does it keep up, what does the API server answer."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.panels import (
    GREEN,
    ORANGE,
    RED,
    Query,
    board,
    graph,
    number,
    over,
    quantiles,
    rate,
    section,
    variable,
)

OPERATOR = 'namespace="$namespace"'
ERRORS = ', result="error"'
FAILED = ', code!~"2..|3.."'


def _rate(metric: str, labels: str = "") -> str:
    return rate(f"rljob_operator_{metric}", f"{OPERATOR}{labels}")


def _reconciles(labels: str = "") -> str:
    """Return the reconciles per second of the last 15 minutes."""
    return f"sum(rate(rljob_operator_reconcile_seconds_count{{{OPERATOR}{labels}}}[15m]))"


def dashboard() -> Dashboard:
    """Return the dashboard."""
    page = board(
        "RLJobs: operator",
        "rljob-operator",
        "The operator of RLJobs. Jobs continue to run without it; nothing is created, replaced or reported.",
        [variable("namespace", "Namespace of the operator", "label_values(rljob_operator_leader, namespace)")],
    )
    page = section(
        page,
        "Is it well?",
        number(
            "Leaders",
            "Exactly one operator leads. 0: none holds the Lease: nothing is reconciled.",
            Query(f"sum(rljob_operator_leader{{{OPERATOR}}})"),
            steps=((None, RED), (1, GREEN), (2, RED)),
            width=3,
        ),
        number(
            "Operators",
            "Operators that Prometheus reaches: the leader and its standbys.",
            Query(f"count(rljob_operator_leader{{{OPERATOR}}})"),
            steps=((None, ORANGE), (2, GREEN)),
            width=3,
        ),
        number(
            "Jobs",
            "RLJobs in the leader's memory.",
            Query(f'max(rljob_operator_cached_objects{{{OPERATOR}, resource="rljobs"}})'),
            width=3,
        ),
        number(
            "Jobs that wait for a worker",
            "More than a few for minutes: raise `workers` of the chart, or the API server is slow.",
            Query(f"max(rljob_operator_queue_depth{{{OPERATOR}}})"),
            steps=((None, GREEN), (20, ORANGE), (100, RED)),
            width=4,
        ),
        number(
            "Failed reconciles",
            "Share of the reconciles that ended with an error in the last 15 minutes; the operator's log has each.",
            Query(over(f"({_reconciles(ERRORS)} or vector(0))", _reconciles())),
            unit="percentunit",
            decimals=1,
            steps=((None, GREEN), (0.01, ORANGE), (0.1, RED)),
            width=3,
        ),
        number(
            "Oldest watch",
            "Seconds since a watch of the API server received data; about 60 at rest. More than 120: the operator does "
            "not see changes.",
            Query(f"max(rljob_operator_watch_age_seconds{{{OPERATOR}}})"),
            unit="s",
            decimals=0,
            steps=((None, GREEN), (120, ORANGE), (300, RED)),
            width=4,
        ),
        number(
            "Kubernetes",
            "Version of the cluster. Red: this version of rljob was never tested with it.",
            Query(f"min by (version) (rljob_operator_kubernetes_supported{{{OPERATOR}}})", "{{version}}"),
            steps=((None, RED), (1, GREEN)),
            width=4,
            named=True,
        ),
    )
    page = section(
        page,
        "Jobs",
        graph(
            "Jobs by condition",
            "RLJobs whose condition is true.",
            Query(
                f'max by (condition) (rljob_operator_jobs{{{OPERATOR}, status="True"}})',
                "{{condition}}",
            ),
            width=12,
        ),
        graph(
            "Objects in memory",
            "Of each kind that the operator watches.",
            Query(f"max by (resource) (rljob_operator_cached_objects{{{OPERATOR}}})", "{{resource}}"),
            width=12,
        ),
    )
    page = section(
        page,
        "Does it keep up?",
        graph(
            "Reconciles",
            "Per second, by result. retry: the plan was outdated and is made again.",
            Query(f"sum by (result) ({_rate('reconcile_seconds_count')})", "{{result}}"),
            unit="ops",
            stacked=True,
        ),
        graph(
            "Duration of a reconcile",
            "With its requests to the API server.",
            *quantiles("rljob_operator_reconcile_seconds", OPERATOR),
            unit="s",
        ),
        graph(
            "Waiting time in the queue",
            "Between an event and its reconcile.",
            *quantiles("rljob_operator_queue_wait_seconds", OPERATOR),
            unit="s",
        ),
        graph(
            "Jobs that wait for a worker",
            "On each operator; only the leader has any.",
            Query(f"max by (pod) (rljob_operator_queue_depth{{{OPERATOR}}})", "{{pod}}"),
        ),
        graph(
            "Lag of the event loop",
            "Longest delay of the last 30 seconds. More than a second: the process has too little CPU (`resources`).",
            Query(f"max by (pod) (rljob_operator_event_loop_lag_seconds{{{OPERATOR}}})", "{{pod}}"),
            unit="s",
        ),
        graph(
            "Age of watches",
            "Seconds since the last data of each watch; about 60 at rest.",
            Query(f"max by (resource) (rljob_operator_watch_age_seconds{{{OPERATOR}}})", "{{resource}}"),
            unit="s",
        ),
    )
    page = section(
        page,
        "What does the API server answer?",
        graph(
            "Requests",
            "Per second, by verb.",
            Query(f"sum by (verb) ({_rate('api_requests_total')})", "{{verb}}"),
            unit="ops",
            stacked=True,
        ),
        graph(
            "Refused and failed requests",
            "Per second, by code. 409 and 404 are normal in small numbers; 403: a right is missing; 429 and 5xx: the "
            "API server is overloaded; error: no answer.",
            Query(f"sum({_rate('api_requests_total', FAILED)}) or vector(0)", "all"),
            Query(f"sum by (code) ({_rate('api_requests_total', FAILED)})", "{{code}}"),
            unit="ops",
        ),
        graph(
            "Restarted watches",
            "Per second, by reason. ended: normal; gone: listed again; error: the connection broke.",
            Query(f"sum({_rate('watch_restarts_total')}) or vector(0)", "all"),
            Query(f"sum by (reason) ({_rate('watch_restarts_total')})", "{{reason}}"),
            unit="ops",
        ),
        graph(
            "Events that could not be recorded",
            "Per second. Jobs are not affected, only `kubectl describe`.",
            Query(f"sum({_rate('events_dropped_total')})", "dropped"),
            unit="ops",
            width=8,
        ),
    )
    return page.build()
