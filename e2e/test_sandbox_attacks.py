"""Attacks on the sandbox of the reward ``code``: on each level of isolation, beside a victim of the same user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.sandbox.attacks import ATTACKS
from e2e.sandbox.driver import SECRET
from e2e.sandbox.levels import LEVELS, Driver, running

LIMITS = {"seconds": 2}


@pytest.fixture(scope="module", params=LEVELS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with running(LEVELS[request.param]) as started:
        yield started
        assert started.end() == []


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nothing_and_leaves_nothing_behind(driver: Driver, name: str) -> None:
    attack = ATTACKS[name]
    answer = driver.run(list(attack.sources), LIMITS | attack.limits)
    *outputs, served = answer["outputs"]
    *ends, served_end = answer["ends"]
    assert attack.outcome(outputs[-1], *ends[-1]) == ""
    assert not any(SECRET in output for output in outputs)
    assert answer["changed"] == [], {
        name: (answer["before"][name], answer["after"][name]) for name in answer["changed"]
    }
    assert served == "served\n", served_end


def test_the_levels_have_the_layers_that_they_name(driver: Driver, request: pytest.FixtureRequest) -> None:
    level = LEVELS[request.node.callspec.params["driver"]]
    assert driver.isolation["present"] == [
        layer for layer in ("bubblewrap", "landlock", "seccomp") if layer not in level.without
    ]
