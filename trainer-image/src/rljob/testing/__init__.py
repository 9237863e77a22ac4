"""Checks of a user's advantages and objectives, for tests: see docs/new-algorithm.md."""

from rljob.testing.check_advantage import check_advantage
from rljob.testing.check_objective import check_objective
from rljob.testing.random_samples import ReferenceSample

__all__ = ["ReferenceSample", "check_advantage", "check_objective"]
