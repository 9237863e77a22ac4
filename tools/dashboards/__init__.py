"""The Grafana dashboards of the chart: fleet, one job, operator.

`make dashboards` writes them to charts/rljob/dashboards; `make verify` compares. They need the labels that the chart's
PodMonitor and ServiceMonitor set: ``namespace``, ``pod``, and on metrics of jobs ``rljob`` (name of the RLJob) and
``rljob_role`` (coordinator, reward-NAME, environment-NAME). e2e/integration/test_dashboards.py sends every query to a
Prometheus that scrapes a run.
"""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tools.dashboards import fleet, job, operator

FOLDER = "charts/rljob/dashboards"
"""Every file of this folder is generated."""
DASHBOARDS = {"fleet": fleet.dashboard, "job": job.dashboard, "operator": operator.dashboard}


def dashboards() -> dict[str, str]:
    """Return path in the repository → JSON of each dashboard."""
    encoder = JSONEncoder(sort_keys=True, indent=1)
    return {f"{FOLDER}/{name}.json": encoder.encode(build()) + "\n" for name, build in DASHBOARDS.items()}
