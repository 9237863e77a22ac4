"""docs/monitoring.md lists all metrics of the service."""

from __future__ import annotations

from pathlib import Path

from rljob.rewards.evaluate import KINDS
from rljob.rewards.metrics import ERROR_KINDS, ERRORS, REGISTRY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def test_docs_list_every_metric_with_its_type() -> None:
    table = PAGE.read_text().partition("| metric of a reward service |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    served = {
        (
            f"{family.name}_total" if family.type == "counter" else family.name,
            family.type,
            "kind" if family.name == "rljob_reward_errors" else "",
        )
        for family in REGISTRY.collect()
    }
    assert sorted(map(tuple, rows)) == sorted(served)


def test_every_kind_of_error_begins_at_0() -> None:
    assert {*KINDS.values(), "other"} == set(ERROR_KINDS)
    (family,) = ERRORS.collect()
    assert {each.labels["kind"] for each in family.samples} == set(ERROR_KINDS)
