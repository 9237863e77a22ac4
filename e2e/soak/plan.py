"""The plan of a soak: which faults each of its three runs gets, in which order. A pure function of seed and minutes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from e2e.soak import full_disk, network, signals, whole_run
from e2e.soak.fault import Family, Fault

FAMILIES: Mapping[str, Family] = {
    "kill": signals.KILL,
    "stop": signals.STOP,
    "hang": signals.HANG,
    "cut": network.CUT,
    "silence": network.SILENCE,
    "loss": network.LOSS,
    "disk": full_disk.DISK,
    "restart": whole_run.RESTART,
}
STALENESS = (0, 1, 2)
"""maxStaleness of each run."""
FULL_MINUTES = 30.0
"""Length of a soak in which each run gets ``per_run`` faults of each family."""
ENGINES = 2
LONGEST_DELAY_SECONDS = 2.0
BESIDE_HANG = ("runner", "trainer", "reward", "coordinator")
"""Victims of kills while another process hangs: two of them, other than the process that hangs."""

Plan = dict[int, list[Fault]]


def plan(seed: int, minutes: float, skip: tuple[str, ...] = ()) -> Plan:
    """Return maxStaleness → faults of the run, in their order.

    The cases of a family are dealt like cards: none comes twice before all have come once.

    Args:
        seed: of the choice and the order.
        minutes: of all runs together; each run gets at least one fault of each family.
        skip: texts; a fault whose name contains one of them is not injected.
    """
    rng = random.Random(seed)
    decks = {
        name: _deal([case for case in family.cases if not any(text in case.name for text in skip)], rng)
        for name, family in FAMILIES.items()
    }
    runs: Plan = {}
    for staleness in STALENESS:
        counts = {name: max(1, round(family.per_run * minutes / FULL_MINUTES)) for name, family in FAMILIES.items()}
        hand = {name: [_placed(case, rng) for case in itertools.islice(decks[name], n)] for name, n in counts.items()}
        restarts = hand.pop("restart")
        faults = list(itertools.chain.from_iterable(hand.values()))
        rng.shuffle(faults)
        runs[staleness] = _spread(faults, restarts)
    return runs


def count(faults: list[Fault]) -> int:
    """Return the number of faults, including those beside others."""
    return sum(1 + len(fault.beside) for fault in faults)


def expected_seconds(faults: list[Fault]) -> float:
    """Return the time that faults take, without the start and the end of the run."""
    return sum(fault.delay + fault.expected for fault in faults)


def steps_until_restart(faults: list[Fault]) -> int:
    """Return the training steps to plan for ``faults``, up to the next one that restarts the run, plus a last one."""
    steps = 1
    for fault in faults:
        steps += fault.steps
        if fault.family == "restart":
            break
    return steps


def _deal(cases: list[Fault], rng: random.Random) -> Iterator[Fault]:
    """Yield the cases again and again, each time in another order."""
    while cases:
        yield from rng.sample(cases, len(cases))


def _placed(case: Fault, rng: random.Random) -> Fault:
    """Return a case with its random parts: delay, engine, faults beside it."""
    beside: tuple[Fault, ...] = ()
    if case.family == "hang":
        others = rng.sample([victim for victim in BESIDE_HANG if victim != case.victim], 2)
        beside = tuple(Fault("kill", "kill", victim) for victim in others)
    delay = 0.0 if case.moment else rng.uniform(0.0, LONGEST_DELAY_SECONDS)
    return replace(case, delay=delay, replica=rng.randrange(ENGINES), beside=beside)


def _spread(faults: list[Fault], restarts: list[Fault]) -> list[Fault]:
    """Insert the restarts at equal distances, none at the very end."""
    result = list(faults)
    for i, restart in reversed(list(enumerate(restarts))):
        result.insert(round(len(faults) * (i + 0.8) / len(restarts)), restart)
    return result
