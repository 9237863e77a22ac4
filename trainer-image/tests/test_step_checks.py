"""When an engine that differs from the trainer ends a run."""

from __future__ import annotations

import math
import re

import pytest

from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.metrics import Mismatch
from rljob.trainer.step_checks import StepChecks


@pytest.mark.parametrize(
    ("dtype", "tokens", "mean", "ends"),
    [
        ("float32", 1, 0.9e-4, False),
        ("float32", 1, 1.1e-4, True),
        ("float32", 9, math.inf, True),
        ("float32", 9, math.nan, False),  # of the trainer: its gradient is nan too, and the update is skipped
        ("bfloat16", 63, 5.0, False),
        ("bfloat16", 64, 5.0, True),
        ("bfloat16", 64, 0.029, False),
        ("bfloat16", 64, math.inf, True),
    ],
)
def test_a_mean_above_the_tolerance_ends_the_run_in_float32_from_the_first_token(job, dtype, tokens, mean, ends):
    made = job(trainer={"dtype": dtype}, rollouts=[{"name": "main", "maxModelLength": 512, "dtype": dtype}])
    checks, mismatch = StepChecks.of(made.spec), Mismatch(tokens, mean, mean)
    if ends:
        shown = re.escape(f"{mean:.2e}")
        with pytest.raises(UnrecoverableError, match=f"of {tokens} tokens of version 3 differ .* by {shown} on"):
            checks.compare(mismatch, 3, first=False)
    else:
        checks.compare(mismatch, 3, first=False)
