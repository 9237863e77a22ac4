"""Decisions of the operator: what is seen of a job leads to a plan. Pure: no clock, no I/O, no randomness.

`life` is the order of a job's life; each other file decides one thing.
"""

from __future__ import annotations

from rljob.operator.planning.job_view import Render, Rendering
from rljob.operator.planning.lifecycle import plan

__all__ = ["Render", "Rendering", "plan"]
