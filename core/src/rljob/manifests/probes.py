"""Probes: whether a part serves, and whether it moves.

How long a part takes to load is nobody's fault: until it serves for the first time nothing kills it. From then on one
that has not moved for failurePolicy.hangSeconds is killed.
"""

from __future__ import annotations

import math
from typing import Any

from rljob.api.pods import PORT_NAME

FOR_EVER = 2**31 - 1
START_PERIOD_SECONDS = 5
PERIOD_SECONDS = 10
TIMEOUT_SECONDS = 10
"""Of one look at a server."""
PROGRAM_SECONDS = 30
"""Of one look by a program: on a node that is overloaded a container takes long to start one."""
FAILURES = 3
"""Of such looks in a row that count."""


def http(hang_seconds: float) -> dict[str, Any]:
    """Return the probes of a server of ours: what answers moves."""
    look = {"httpGet": {"path": "/healthz", "port": PORT_NAME}}
    ready = {"httpGet": {"path": "/readyz", "port": PORT_NAME}}
    often = {"periodSeconds": START_PERIOD_SECONDS, "timeoutSeconds": TIMEOUT_SECONDS}
    return {
        "startupProbe": {**look, **often, "failureThreshold": FOR_EVER},
        "livenessProbe": _liveness(look, math.ceil(hang_seconds / PERIOD_SECONDS)),
        "readinessProbe": {**ready, **often},
    }


def files(hang_seconds: float) -> dict[str, Any]:
    """Return the probes of a part that nobody dials: a program in its container looks at the files it touches.

    A pod is ready when the part itself can do its work, whether or not others let it: so a drain takes one engine
    after the other, and a coordinator that restarts makes no engine unready.

    Of liveness the third failure in a row counts: a clock that is put forward makes every heartbeat old until the next
    beat, and a look that a busy node cannot start in time counts as one that failed.
    """
    look = ["python", "-m", "rljob.protocol.probe"]
    often = {"periodSeconds": PERIOD_SECONDS, "timeoutSeconds": PROGRAM_SECONDS}
    moves = {"exec": {"command": [*look, "moves", f"{hang_seconds:g}"]}}
    serves = {"exec": {"command": [*look, "serves"]}}
    return {
        "livenessProbe": {**moves, **often, "failureThreshold": FAILURES},
        "readinessProbe": {**serves, **often, "failureThreshold": 1},
    }


def socket() -> dict[str, Any]:
    """Return the probes of a server of the user's, of which nothing is known but that it listens."""
    ready = {"tcpSocket": {"port": PORT_NAME}}
    return {"readinessProbe": {**ready, "periodSeconds": START_PERIOD_SECONDS, "timeoutSeconds": TIMEOUT_SECONDS}}


def _liveness(look: dict[str, Any], failures: int) -> dict[str, Any]:
    return {
        **look,
        "periodSeconds": PERIOD_SECONDS,
        "timeoutSeconds": TIMEOUT_SECONDS,
        "failureThreshold": max(1, failures),
    }
