"""Compares an advantage estimator with a reference in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import needs_greedy, needs_states
from rljob.protocol.batch_samples import BatchSample
from rljob.testing.random_samples import ONE_RANK, Floats, ReferenceSample, compare, naming, random_samples, resolved
from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Estimator
from rljob.trainer.algorithms.needs import Needs, load_function, needs_of
from rljob.trainer.algorithms.returned_values import numbers_of_rows
from rljob.trainer.batch import Row
from rljob.trainer.scores import Scores

AdvantageReference: TypeAlias = Callable[[Sequence[ReferenceSample], Algorithm], Sequence[Floats | float]]
"""(samples of the batch, resolved spec.algorithm) → advantage of each sample: one number, or one of each token (T,)."""
PROMPT = 2
ADVANTAGE, SAME = 1e-10, 1e-9


def check_advantage(reference: AdvantageReference, fields: Mapping[str, Any], seeds: int = 5) -> None:
    """Check the advantage of an algorithm on random batches: groups of one to four members, samples of several turns.

    The advantage of each token equals that of the reference within 1e-10, and does not depend on the order of the
    groups.

    Args:
        reference: of a whole batch.
        fields: ``spec.algorithm``, as in a manifest; ``advantage`` names the function.
        seeds: number of random batches.

    Raises:
        AssertionError: the advantage differs; the message names the first token.
        ValueError: the fields are wrong, or the estimator returns another shape or nan.
    """
    algorithm = resolved(fields)
    for seed in range(seeds):
        samples = random_samples(seed)
        with naming(algorithm, "advantage"):
            found = estimate(algorithm, samples)
        expected = reference(samples, algorithm)
        if len(expected) != len(samples):
            raise AssertionError(f"the reference returned {len(expected)} advantages for {len(samples)} samples")
        for i, sample in enumerate(samples):
            each_T = np.broadcast_to(np.asarray(expected[i], np.float64), sample.logprobs_T.shape)
            compare("the advantage", found[i], each_T, ADVANTAGE, i, seed)
        order = sorted(range(len(samples)), key=lambda i: samples[i].group, reverse=True)
        moved = estimate(algorithm, [samples[i] for i in order])
        for i, advantages_T in zip(order, moved, strict=True):
            compare("with the groups in another order, the advantage", advantages_T, found[i], SAME, i, seed)


@dataclass(frozen=True)
class _Known:
    """Scores whose log-probabilities are known; see :class:`rljob.trainer.scores.Scores`."""

    rows: Mapping[int, Row]
    samples: Sequence[ReferenceSample]
    needs: Needs

    def old_by_row(self) -> dict[int, NDArray[np.float32]]:
        return self._by_row("old")

    def reference_by_row(self) -> dict[int, NDArray[np.float32]]:
        return self._by_row("reference")

    def teacher_by_row(self) -> dict[int, NDArray[np.float32]]:
        return self._by_row("teacher")

    def values_by_row(self) -> dict[int, NDArray[np.float32]]:
        return self._by_row("values")

    def _by_row(self, name: str) -> dict[int, NDArray[np.float32]]:
        if not getattr(self.needs, name):
            raise ValueError(f"there are no {name} scores; declare @requires({name}=True)")
        values = {i: getattr(sample, f"{name}_T") for i, sample in enumerate(self.samples)}
        return {i: at_tokens(row, values[i]).astype(np.float32) for i, row in self.rows.items()}


def at_tokens(row: Row, values_T: Floats) -> Floats:
    """Return values of the model's tokens as an array of all tokens (L,), 0 elsewhere."""
    values_L = np.zeros(len(row.mask_L))
    values_L[row.mask_L] = values_T
    return values_L


def estimate(algorithm: Algorithm, samples: Sequence[ReferenceSample]) -> list[Floats]:
    """Return the advantages of the model's tokens (T,) of each sample.

    Baselines are nan unless the algorithm has greedy answers, and there are no states of turns unless it may read them,
    as in a run.

    Raises:
        ValueError: an array has another shape, or an advantage is not finite.
    """
    estimator: Estimator = load_function(algorithm, "advantage")
    batch = [
        BatchSample(
            sample=f"{sample.group}.{i}",
            group=sample.group,
            reward=sample.reward,
            prompt_tokens=PROMPT,
            response_tokens=len(sample.turns_T),
            total_tokens=PROMPT + len(sample.turns_T) + int(sample.turns_T[-1]),
            min_version=0,
            temperature=1.0,
            max_tokens=sample.max_tokens,
            baseline=sample.baseline if needs_greedy(algorithm) else None,
            turn_rewards=_turn_rewards(sample) if needs_states(algorithm) else [],
            turn_states=list(sample.states) if needs_states(algorithm) else [],
        )
        for i, sample in enumerate(samples)
    ]
    rows = {i: _row(sample) for i, sample in enumerate(samples)}
    rewards = {i: row.rewards_L for i, row in rows.items()}
    scores = cast("Scores", _Known(rows, samples, needs_of(estimator)))
    returned = estimator(AdvantageInputs(0, batch, rows, rewards, scores, ONE_RANK, algorithm))
    found = numbers_of_rows(returned, {i: len(row.mask_L) for i, row in rows.items()})
    advantages = [found[i][row.mask_L] for i, row in rows.items()]
    if not all(np.isfinite(each_T).all() for each_T in advantages):
        greedy = "" if needs_greedy(algorithm) else "; baselines_N is nan for every advantage but remax"
        raise ValueError(f"it returned nan or an infinite number{greedy}")
    return advantages


def _turn_rewards(sample: ReferenceSample) -> list[float]:
    """Return the reward of each turn."""
    return [float(sample.rewards_T[sample.turns_T == turn].sum()) for turn in range(len(sample.states))]


def _row(sample: ReferenceSample) -> Row:
    """Return the tokens of a sample: a prompt, then turns with one token of an observation between them."""
    places_T = PROMPT + np.arange(len(sample.turns_T)) + sample.turns_T
    mask_L = np.zeros(int(places_T[-1]) + 1, np.bool_)
    mask_L[places_T] = True
    ends = tuple(int(place) + 1 for place in places_T[:-1][np.diff(sample.turns_T) > 0])
    row = Row(np.zeros(len(mask_L), np.int64), np.zeros(len(mask_L), np.float32), mask_L, np.zeros(len(mask_L)), ends)
    row.rewards_L[mask_L] = sample.rewards_T
    return row
