"""Compares the example's objective with the formula in NumPy: pytest examples/objectives/test_spo.py"""

import numpy as np
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.testing import ReferenceSample, check_objective


def reference(sample: ReferenceSample, algorithm: Algorithm) -> NDArray[np.float64]:
    ratio = np.exp(np.clip(sample.logprobs_T - sample.old_T, -20, 20))
    penalty = np.abs(sample.advantages_T) / (2 * algorithm.clip_high) * (ratio - 1) ** 2
    return ratio * sample.advantages_T - penalty


def test_the_objective_and_its_gradient_are_those_of_the_formula() -> None:
    check_objective(reference, {"objective": "examples.objectives.spo:spo", "clipHigh": 0.3})
