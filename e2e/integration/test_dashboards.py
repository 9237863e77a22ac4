"""Every query of the dashboards returns data from a Prometheus that scraped a run, with the labels of the monitors."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.integration.helm_program import CHART, Helm, of_kind
from e2e.integration.prometheus_server import Prometheus, Target, running_prometheus
from e2e.integration.scraped_run import MANIFEST, ScrapedRun, scraped_run
from e2e.system_packages import require_packages
from rljob.api.models import RLJob
from rljob.manifests import names
from rljob.manifests.inputs import RenderTarget
from rljob.manifests.render import render
from rljob.operator.metrics import Metrics
from rljob.operator.metrics_server import build_app, serving
from rljob.protocol.free_port import free_port

ON = ("--set", "monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true")
OPERATOR = {"namespace": "rljob-system", "service": "rljob-operator-metrics", "pod": "rljob-operator-0"}
VARIABLES = {"namespace": "research", "rljob": "sums", "metric": ".*", "__rate_interval": "10s"}
AWAITED = (
    "rljob_accuracy",
    'rate(rljob_reward_seconds_count{rljob="sums"}[10s]) > 0',
    "rate(rljob_environment_steps_total[10s]) > 0",
    "rate(rljob_policy_version[10s]) > 0",
    'ALERTS{alertname="RLJobCoordinatorDown", rljob="lost"}',
)
"""Queries that return a series once each process of the run has worked."""
TICK_SECONDS = 0.2
SECONDS = 300.0


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels of a dashboard that have queries."""
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def boards() -> dict[str, dict[str, Any]]:
    """Return title → dashboard of the chart."""
    found = [json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))]
    return {board["title"]: board for board in found}


def filled(expr: str, title: str) -> str:
    """Return a query with the values of the dashboard's variables."""
    values = VARIABLES | ({"namespace": OPERATOR["namespace"]} if title == "RLJobs: operator" else {})
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expr)


def relabelings(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of the PodMonitor."""
    (endpoint,) = of_kind([*found], "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    return list(endpoint["relabelings"])


def pod_labels(run: ScrapedRun) -> dict[str, dict[str, str]]:
    """Return role → labels of its pods, as the operator renders them."""
    found = {}
    for role in render(run.job, RenderTarget(namespace="research")):
        for each in role.objects:
            if template := each.get("spec", {}).get("template"):
                found[role.name] = template["metadata"]["labels"]
    return found


def selected(monitor: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a PodMonitor selects pods with these labels."""
    selector = monitor["spec"]["selector"]
    equal = all(labels.get(key) == value for key, value in selector["matchLabels"].items())
    (rule,) = selector["matchExpressions"]
    return equal and rule["operator"] == "In" and labels.get(rule["key"]) in rule["values"]


def discovered(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that Prometheus gives to a pod before relabeling, and those of the Prometheus Operator."""
    meta = {f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9]', '_', key)}": value for key, value in labels.items()}
    return meta | {"namespace": "research", "pod": f"sums-{labels[names.ROLE]}-0"}


@asynccontextmanager
async def operator_metrics() -> AsyncIterator[str]:
    """Serve the operator's metrics with its own server; yield host:port."""
    metrics = Metrics()
    metrics.at_scrape(
        lambda: [("Ready", "True"), ("Failed", "True"), ("Stalled", "False")],
        lambda: {"rljobs": 2, "pods": 12},
        lambda: {"pods": 20.0},
        lambda: {"runner": 2},
    )
    metrics.leader.set(1)
    metrics.kubernetes_supported.labels("v1.36.3").set(1)

    async def work() -> None:
        while True:
            metrics.reconcile_seconds.labels("done").observe(0.02)
            metrics.reconcile_seconds.labels("error").observe(0.2)
            metrics.queue_wait_seconds.observe(0.001)
            metrics.count_request("GET", "200")
            metrics.count_request("PATCH", "409")
            metrics.watch_restarts.labels("pods", "ended").inc()
            await asyncio.sleep(TICK_SECONDS)

    working = asyncio.create_task(work())
    try:
        async with serving(build_app(metrics, lambda: True), "127.0.0.1:0") as port:
            yield f"127.0.0.1:{port}"
    finally:
        working.cancel()


def targets(run: ScrapedRun, operator: str, rules: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return the targets; one is the coordinator of another job, which does not answer."""
    labels = pod_labels(run)
    jobs = [Target(address, discovered(labels[role]), rules) for role, address in run.addresses.items()]
    lost = discovered(labels["coordinator"]) | {"__meta_kubernetes_pod_label_rljob_dev_job": "lost"}
    return [*jobs, Target(f"127.0.0.1:{free_port()}", lost, rules), Target(operator, OPERATOR)]


def alerts() -> str:
    """Return the rules of the chart; each alert fires at once."""
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return yaml.safe_dump(rules)


async def problems(prometheus: Prometheus) -> list[str]:
    """Return one sentence for each query of a dashboard without a number."""
    found = []
    for title, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                series = await prometheus.query(filled(target["expr"], title))
                values = [float(each["value"][1]) for each in series]
                if not values or any(map(math.isnan, values)):
                    found.append(f"{title}: {panel['title']}: {values or 'no series'}: {target['expr']}")
    return found


@pytest.mark.timeout(900)
async def test_every_query_of_the_dashboards_returns_data_of_a_run(program: Helm, tmp_path: Path) -> None:
    require_packages("monitoring")
    rules = relabelings(program.template(*ON))
    storage = tmp_path / "run"
    storage.mkdir()
    with scraped_run(storage) as run:
        async with (
            operator_metrics() as operator,
            running_prometheus(tmp_path, targets(run, operator, rules), alerts()) as prometheus,
        ):
            for awaited in AWAITED:
                await prometheus.until(awaited, SECONDS)
            deadline = time.monotonic() + SECONDS  # on a busy machine scrapes fail, and rates have gaps
            while (found := await problems(prometheus)) and time.monotonic() < deadline:
                await asyncio.sleep(TICK_SECONDS)
            assert not found
            (state,) = await prometheus.query("rljob_run_state == 1")
    assert (state["metric"]["state"], state["metric"]["namespace"]) in {
        ("Running", "research"),
        ("Evaluating", "research"),
    }


def test_the_monitors_select_the_pods_that_serve_metrics(program: Helm, tmp_path: Path) -> None:
    monitor = of_kind(program.template(*ON), "PodMonitor")
    labels = pod_labels(ScrapedRun(RLJob.model_validate(MANIFEST), {}))
    assert {role for role, each in labels.items() if selected(monitor, each)} == {
        "coordinator",
        "reward-exact",
        "environment-lake",
    }


def test_every_panel_says_what_it_shows() -> None:
    for title, board in boards().items():
        named = [panel["title"] for panel in panels(board)]
        assert len(named) == len(set(zip(named, (panel["type"] for panel in panels(board)), strict=True))), title
        assert all(len(panel.get("description", "")) >= 15 for panel in panels(board)), title
