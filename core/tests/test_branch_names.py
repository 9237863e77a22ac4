"""Names of branches: which turn a turn continues, the order of turns, and the ends of sequences."""

from __future__ import annotations

import pytest

from rljob.protocol.branches import before, check_turn, child, context_name, first_turn, last_turns, order, path


def test_a_name_says_where_the_branch_was_made():
    first = child("", 2, 1)
    second = child(first, 4, 3)
    assert (first, second, first_turn(second), first_turn("")) == ("2.1", "2.1/4.3", 4, 0)
    assert (context_name("g0.1", ""), context_name("g0.1", second)) == ("g0.1", "g0.1@2.1/4.3")


def test_a_turn_continues_its_branch_or_the_branch_that_this_was_made_from():
    assert path((5, "2.1/4.3")) == [(0, ""), (1, ""), (2, "2.1"), (3, "2.1"), (4, "2.1/4.3"), (5, "2.1/4.3")]
    assert path((2, "2.1/2.2")) == [(0, ""), (1, ""), (2, "2.1/2.2")], "2.1 had no turn when 2.2 was made from it"
    assert before((0, "0.1/0.2")) is None and before((0, "")) is None


def test_turns_are_ordered_by_branch_and_then_by_number():
    turns = [(0, ""), (3, ""), (1, "1.2"), (2, "1.2"), (2, "1.2/2.1"), (1, "1.10"), (2, "2.1")]
    assert sorted(turns[::-1], key=order) == turns


def test_a_sequence_ends_where_no_branch_continues():
    assert last_turns([(2, "")]) == [(2, "")]
    assert last_turns([(1, ""), (3, "2.1")]) == [(3, "2.1")]
    assert last_turns([(2, ""), (3, "2.10"), (2, "2.2")]) == [(2, ""), (2, "2.2"), (3, "2.10")]
    assert last_turns([(1, ""), (2, "2.1"), (3, "2.1/3.1"), (3, "2.1/3.2")]) == [(3, "2.1/3.1"), (3, "2.1/3.2")]
    assert last_turns([(0, "0.1"), (0, "0.2")]) == [(0, "0.1"), (0, "0.2")]


@pytest.mark.parametrize(
    ("turn", "branch"),
    [
        (-1, ""), (0, "a"), (0, "0"), (0, "0.0"), (0, ".1"), (5, "2.1/"), (5, "/2.1"), (5, "2.1 "), (5, "02.1"),
        (5, "2.01"), (5, "٢.1"), (1, "2.1"), (5, "4.1/2.1"), (9, "/".join(["1.1"] * 251)),
    ],
)  # fmt: skip
def test_what_is_no_turn_of_a_branch_is_refused(turn, branch):
    with pytest.raises(ValueError, match=r"it requests turn -?\d of "):
        check_turn(turn, branch)
    check_turn(5, "2.1/4.3")
    check_turn(2, "2.1/2.1")
