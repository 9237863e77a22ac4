"""A fault of the soak, and a family of faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from e2e.faults.proxy import Moment

if TYPE_CHECKING:
    from e2e.soak.soak_run import SoakRun


class FaultError(Exception):
    """The run did not react to a fault as it must; the message says how."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    ``family``: key of :data:`e2e.soak.plan.FAMILIES`. ``kind``: what happens. ``victim``: the process, port or file to
    which it happens. ``seconds``: how long it lasts. ``moment``: when it is injected; without one it is injected
    ``delay`` seconds after the fault before it. ``replica``: index of the engine. ``expected``: seconds on two quiet
    cores, with the recovery. ``beside``: faults that are injected while this one lasts.
    """

    family: str
    kind: str
    victim: str
    seconds: float = 0.0
    moment: Moment | None = None
    expected: float = 6.0
    delay: float = 0.0
    replica: int = 0
    beside: tuple[Fault, ...] = ()

    @property
    def name(self) -> str:
        """Name for people; unique among the cases of all families."""
        lasting = f" {self.seconds:g} s" if self.seconds else ""
        when = f" {self.moment.when} {self.moment.message}" if self.moment else ""
        return f"{self.kind} {self.victim}{lasting}{when}"

    @property
    def steps(self) -> int:
        """Training steps to plan for this fault; see ``SoakRun``."""
        return 6 + int(self.seconds / 10)


@dataclass(frozen=True)
class Family:
    """Faults of one sort.

    ``cases``: its faults. ``per_run``: how many of them one run of ten minutes gets. ``begin``: injects a fault at
    once. ``finish``: returns when the fault is over. Both raise :class:`FaultError`.
    """

    cases: tuple[Fault, ...]
    per_run: int
    begin: Callable[[SoakRun, Fault], None]
    finish: Callable[[SoakRun, Fault], Awaitable[None]]
