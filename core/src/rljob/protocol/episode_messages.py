"""Protocol of environment services, version 1: JSON over HTTP. docs/environment-openapi.json describes the routes.

POST /v1/sessions with an OpenSession starts an episode; POST /v1/sessions/SESSION/steps with a StepRequest makes its
next step; DELETE /v1/sessions/SESSION ends it. The first two are answered with an Observation. Steps are numbered from
1. A request that is repeated gets the reply of the first one and has no second effect, so a client repeats a request
whose reply it has not received. Only the last request of a session can be repeated.

The runner sends no request beyond the bounds below and accepts no reply beyond them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rljob.protocol.score_messages import usable

MAX_SESSION = 128
"""Characters of the name of a session: letters, digits, and . _ -"""
MAX_ACTION = 1 << 20
"""Characters of an action."""
MAX_OBSERVATION = 1 << 20
"""Characters of an observation."""
MAX_METRICS = 64
"""Metrics of an observation."""
MAX_REQUEST_BYTES = 16 << 20
"""Length of a request."""
MAX_REPLY_BYTES = 8 << 20
"""Length of an Observation."""
SESSION_PATTERN = rf"^[A-Za-z0-9._-]{{1,{MAX_SESSION}}}$"


class OpenSession(msgspec.Struct):
    """Starts an episode."""

    session: str  # chosen by the client, unique; see SESSION_PATTERN
    seed: int  # of the episode: it differs between the samples of a group
    row: dict[str, Any]  # the row of the task's data: equal for the samples of a group


class StepRequest(msgspec.Struct):
    """The next action of an episode."""

    step: int  # 1 for the first action
    action: str  # the text of the model


class Observation(msgspec.Struct):
    """Reply of an environment: step 0 is the reset.

    ``terminated``: the episode is over. ``truncated``: it was ended by a limit of the environment. ``metrics``: values
    of the episode so far; the last one counts. ``means``: values of this step; the sample's metric is their mean.
    """

    step: int
    observation: str
    reward: float = 0.0  # of this step
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, float] = {}
    means: dict[str, float] = {}

    @property
    def ended(self) -> bool:
        """Whether no further step is possible."""
        return self.terminated or self.truncated


def problem_of(reply: Observation) -> str:
    """Return why a reply breaks a bound or has a number that is not usable, or empty text. The subject is omitted."""
    if len(reply.observation) > MAX_OBSERVATION:
        return f"an observation of {len(reply.observation):,} characters; at most {MAX_OBSERVATION:,} are allowed"
    if len(reply.metrics) + len(reply.means) > MAX_METRICS:
        return f"{len(reply.metrics) + len(reply.means)} metrics; at most {MAX_METRICS} are allowed"
    if not usable(reply.reward):
        return f"the reward {reply.reward}"
    for name, value in (*reply.metrics.items(), *reply.means.items()):
        if not usable(value):
            return f"the metric {name} = {value}"
    return ""
