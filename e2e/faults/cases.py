"""The fault matrix: component × fault × phase of a run; each case has a unique name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from e2e.faults.environment import COMPONENTS, FaultEnvironment
from e2e.faults.proxy import Moment

PHASES: dict[str, list[tuple[str, str]]] = {
    "start": [("runner", "RegisterRunner"), ("agent", "RegisterEngine"), ("trainer", "RegisterTrainer"),
              ("trainer", "TrainerRegistered")],
    "generation": [("runner", "LeaseTrajectory"), ("runner", "GenerateRequest"), ("agent", "Generate"),
                   ("agent", "Completions"), ("agent", "AckCompletions"), ("runner", "GenerateResult")],
    "reward": [("reward", "Score"), ("runner", "TrajectoryScored"), ("runner", "AckTrajectories")],
    "batch": [("trainer", "Train"), ("trainer", "Pull")],
    "training": [("trainer", "StepDone")],
    "checkpoint": [("trainer", "Checkpoint"), ("trainer", "Checkpointed")],
    "update": [("trainer", "SendWeights"), ("trainer", "WeightGroupReady"), ("agent", "PrepareWeights"),
               ("agent", "WeightAck"), ("trainer", "WeightsSent")],
    "suspend": [("trainer", "Checkpoint"), ("trainer", "Checkpointed"), ("trainer", "Stop")],
    "shutdown": [("trainer", "Stop")],
}  # fmt: skip
"""Phase → the messages that mark it: (component that sends or receives the message, name of the message)."""

FAULTS = {
    "kill": ("before", "after"),
    "cut": ("before", "after"),
    "stop": ("before",),
    "hang": ("after",),
    "full": ("before", "after"),
}
"""Fault → when it is injected. ``kill``: kill -9. ``cut``: its connections break. ``stop``: SIGSTOP for longer than
all time-outs, then SIGCONT. ``hang``: SIGSTOP until a supervisor kills the process. ``full``: a full disk."""

PING_SECONDS = 0.4
DETECTION_SECONDS = 2 * PING_SECONDS + 0.4
"""After this time all components detect a silent peer: two pings, the grace of a connection, and a margin."""
FULL_SECONDS = 0.5
THOROUGH = "RLJOB_THOROUGH"
"""Environment variable: if set, the whole matrix is tested."""


@dataclass(frozen=True)
class Case:
    """One cell: ``fault`` is injected into ``victim`` at ``moment``, in ``phase``."""

    fault: str
    victim: str
    phase: str
    moment: Moment

    @property
    def name(self) -> str:
        """Name of the case, unique."""
        return f"{self.fault}-{self.victim}-{self.phase}-{self.moment.when}-{self.moment.message}"

    def inject(self, environment: FaultEnvironment) -> None:
        """Inject the fault."""
        if self.fault == "kill":
            environment.kill_9(self.victim)
        elif self.fault == "cut":
            environment.cut(self.victim)
        elif self.fault == "stop":
            environment.stop(self.victim, DETECTION_SECONDS)
        elif self.fault == "hang":
            environment.stop(self.victim, None)
        else:
            environment.fill_disk(FULL_SECONDS)


def all_cases() -> list[Case]:
    """Return the whole matrix. A full disk affects all components: its victim is called ``all``."""
    return [
        Case(fault, victim, phase, Moment(component, message, when))
        for fault in FAULTS
        for victim in _victims(fault)
        for phase, messages in PHASES.items()
        for component, message in messages
        for when in FAULTS[fault]
    ]


def cases_of_every_change() -> list[Case]:
    """Return a kill of every victim at every message, before or after it, and the other faults at every message.

    Before and after alternate over both victims and messages. The victims of the other faults take turns.
    """
    return [
        Case(fault, victim, phase, Moment(component, message, FAULTS[fault][(v + m) % len(FAULTS[fault])]))
        for f, fault in enumerate(FAULTS)
        for v, victim in enumerate(_victims(fault))
        for m, (phase, component, message) in enumerate(_messages())
        if fault == "kill" or (f + v + m) % len(_victims(fault)) == 0
    ]


def selected_cases() -> list[Case]:
    """Return the cases to test: all if RLJOB_THOROUGH is set (`make thorough`)."""
    return all_cases() if os.environ.get(THOROUGH) else cases_of_every_change()


def _victims(fault: str) -> tuple[str, ...]:
    return COMPONENTS if fault != "full" else ("all",)


def _messages() -> Iterator[tuple[str, str, str]]:
    """Yield phase, component and message of every moment."""
    for phase, messages in PHASES.items():
        for component, message in messages:
            yield phase, component, message
