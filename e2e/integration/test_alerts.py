"""The alerts of the chart: promtool runs their cases; each has texts, a runbook and known metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from e2e.integration.helm_program import CHART
from e2e.integration.prometheus_server import ROOT, promtool
from e2e.system_packages import require_packages

RULES = CHART / "files/alerts.yaml"
CASES = Path(__file__).parent / "alert_cases.yaml"
PAGES = ("docs/monitoring.md", "docs/operator.md")


def alerts() -> dict[str, dict[str, Any]]:
    """Return name → rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_the_cases_of_the_alerts_pass() -> None:
    require_packages("monitoring")
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(CASES))


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts().keys()
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts().keys()


def test_every_alert_has_a_severity_texts_and_a_section_in_its_page() -> None:
    sections = re.findall(r"^### (RLJob\w+)$", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE)
    assert sections == [*alerts()]
    for name, rule in alerts().items():
        assert rule["labels"].keys() == {"severity"}, name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name


def test_the_alerts_use_documented_metrics_only() -> None:
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    documented = set(re.findall(r"^\| `(rljob_\w+)`", pages, re.MULTILINE)) | {"rljob_role"}
    for name, rule in alerts().items():
        used = {re.sub("_count$", "", metric) for metric in re.findall(r"\brljob_\w+", rule["expr"])}
        assert used <= documented, (name, used - documented)
