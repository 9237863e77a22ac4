"""docs/monitoring.md lists all metrics of the service."""

from __future__ import annotations

from pathlib import Path

from rljob.rewards.metrics import REGISTRY

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
