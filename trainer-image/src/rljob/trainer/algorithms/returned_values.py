"""Checks of what a function of a user returned, of which its interface asks for numbers.

Shapes: N entries: samples, members of a group, or tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def kind_of(value: object) -> str:
    """Return the type of a value as a message names it: its name; None for None."""
    return "None" if value is None else type(value).__name__


def numbers_of(returned: object, count: int, what: str) -> NDArray[np.float64]:
    """Return what a function returned as an array of ``count`` numbers (N,).

    Args:
        returned: an array, a list or a tensor.
        count: N.
        what: the entries, for the message: "12 samples".

    Raises:
        ValueError: it is no array of numbers, or of another shape.
    """
    try:
        numbers_N = None if returned is None else np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):  # a mapping, text, a ragged list, a tensor with a gradient
        numbers_N = None
    if numbers_N is None:
        raise ValueError(f"it returned {kind_of(returned)} for {what}; it must return an array of {count} numbers")
    if numbers_N.shape != (count,):
        raise ValueError(f"it returned an array of shape {numbers_N.shape} for {what}; it must have shape ({count},)")
    return numbers_N


def numbers_of_rows(returned: object, tokens: Mapping[int, int]) -> dict[int, NDArray[np.float64]]:
    """Return what an advantage estimator returned as an array of numbers (N,) for each row.

    Args:
        returned: by index of the row in the batch.
        tokens: of each row, N, by index in the batch.

    Raises:
        ValueError: it is no mapping, lacks a row, or has something else than an array of the row's shape.
    """
    if not isinstance(returned, Mapping):
        raise ValueError(
            f"it returned {kind_of(returned)}; it must return a mapping from each index of inputs.rows to an array, or "
            "be marked with @per_group, @per_batch or @from_scalars"
        )
    missing = [i for i in tokens if i not in returned]
    if missing:
        raise ValueError(
            f"it returned no array for {len(missing)} of the {len(tokens)} rows; it must return one for each index of "
            "inputs.rows"
        )
    return {i: numbers_of(returned[i], count, f"{count} tokens") for i, count in tokens.items()}
