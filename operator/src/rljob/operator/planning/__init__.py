"""Planning: from the observation of a job to a plan. Pure: no clock, no I/O, no randomness.

`lifecycle` defines the order of decisions; each other file makes one kind of decision.
"""

from __future__ import annotations

from rljob.operator.planning.job_view import Render, Rendering
from rljob.operator.planning.lifecycle import plan

__all__ = ["Render", "Rendering", "plan"]
