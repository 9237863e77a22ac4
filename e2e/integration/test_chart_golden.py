"""What the chart renders for ten sets of values equals golden files."""

from __future__ import annotations

import pytest

from e2e.integration import chart_goldens
from e2e.integration.chart_goldens import GOLDEN, SETS
from e2e.integration.helm_program import Helm

OUTDATED = "python -m e2e.integration.chart_goldens --update updates the file"


@pytest.fixture(scope="module")
def texts(program: Helm) -> dict[str, str]:
    return chart_goldens.texts(program)


@pytest.mark.parametrize("name", SETS)
def test_the_objects_of_a_set_of_values_equal_its_golden_file(texts: dict[str, str], name: str) -> None:
    assert (GOLDEN / f"{name}.yaml").read_text() == texts[f"{name}.yaml"], OUTDATED


def test_there_is_a_golden_file_for_each_of_at_least_ten_sets() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*SETS} and len(SETS) >= 10
