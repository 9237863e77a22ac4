"""Integer keys of groups and samples: the ids that follow from them are those that users see, in Python and in SQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rljob.ledger.sample_numbers import (
    EVALUATION_BITS,
    MEMBERS,
    evaluation_numbers,
    find_number,
    group_id,
    group_number,
    sample_id,
    sample_number,
)
from rljob.ledger.writer import LedgerWriter

SAMPLES = ("g0.0", "g0.4095", "g12.3", "g4000000000.7", "e0.0.0", "e3.7.11", "e3.268435455.4095", "e2000000.5.1")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerWriter]:
    writer = LedgerWriter(tmp_path_factory.mktemp("ledger"))
    yield writer
    writer.close()


@pytest.mark.parametrize("sample", SAMPLES)
def test_an_id_is_derived_from_its_number(ledger: LedgerWriter, sample: str) -> None:
    number = sample_number(sample)
    group, _, member = sample.rpartition(".")
    assert -(1 << 63) <= number < 1 << 63
    assert (sample_id(number), group_id(group_number(group))) == (sample, group)
    ledger.db.execute("INSERT INTO samples (number) VALUES (?)", (number,))
    ledger.db.execute("INSERT INTO groups VALUES (?,'',0,'',0,0,0,NULL,0,1)", (group_number(group),))
    row = ledger.db.execute("SELECT id, group_id, group_number, member FROM samples WHERE number = ?", (number,))
    assert row.fetchone() == (sample, group, group_number(group), int(member))
    row = ledger.db.execute("SELECT id FROM groups WHERE number = ?", (group_number(group),))
    assert row.fetchone() == (group,)
    ledger.db.execute("DELETE FROM groups")


def test_groups_of_an_evaluation_have_a_range_of_their_own() -> None:
    lowest, highest = evaluation_numbers(3)
    assert (group_id(highest), group_id(lowest)) == ("e3.0", f"e3.{(1 << EVALUATION_BITS) - 1}")
    assert group_number("e4.0") == lowest - 1 and group_number(f"e2.{(1 << EVALUATION_BITS) - 1}") == highest + 1
    assert group_number("e0.0") < group_number("g0")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "g",
        "g1",
        "g01.1",
        "g1.x",
        f"g1.{MEMBERS}",
        "e1.2",
        "x1.2",
        "g-1.0",
        "g1.1 ",
        f"g{1 << 51}.0",
        f"e{1 << 23}.0.0",
    ],
)
def test_other_names_have_no_number(name: str) -> None:
    assert find_number(name) is None


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_is_found_by_its_id(sample: str) -> None:
    assert find_number(sample) == sample_number(sample)
