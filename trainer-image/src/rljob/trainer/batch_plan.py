"""Which rank computes which samples of a batch, in which microbatches. Pure functions of the batch's scalars.

A row of a microbatch is one sequence. A sample with branches has several, which are on one rank, in microbatches of the
same minibatch. In a batch without branches rows and samples have the same numbers.

Every rank computes the same plan from the scalars, and pulls only its own samples. The loss of a minibatch is a sum
over tokens whose weights do not depend on the plan, so neither does the gradient.

All ranks take part in the collectives of every forward and backward pass. So all ranks have the same number of
microbatches in a minibatch, and a rank waits for the slowest one. The plan balances each minibatch by itself.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train

EXTRA_MICROBATCHES = 3
"""More microbatches than the budget needs are tried up to this number: shorter ones have less padding."""
MICROBATCH_POSITIONS = 64
"""Cost of one more microbatch (launches and collectives), in positions."""
PADDED_LIMIT = 4
"""Largest number of padded positions of a microbatch of packed rows, as a multiple of its budget."""


@dataclass(frozen=True)
class BatchSequence:
    """A sequence of a sample: its tokens [start, end)."""

    sample: int  # index in the batch
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class BatchPlan:
    """Plan of a batch for one data-parallel rank."""

    train: Train
    trained_N: NDArray[np.bool_]  # whether each sample is trained
    first_trained: list[int]  # trained samples of the first minibatch, of all ranks
    minibatches: list[list[int]]  # samples of each minibatch, trained or not
    microbatches: list[list[list[int]]]  # of each minibatch: rows of each of this rank's microbatches
    lockstep: float  # positions of the slowest rank × ranks / tokens, over all minibatches; 1 is ideal
    packed: bool = False  # rows of a microbatch are computed without padding

    @cached_property
    def rows(self) -> list[BatchSequence]:
        """All rows of the batch."""
        return sequences(self.train.samples)

    @property
    def indices(self) -> list[int]:
        """This rank's trained samples, in the order of the batch."""
        rows = (row for minibatch in self.microbatches for microbatch in minibatch for row in microbatch)
        return sorted({self.rows[row].sample for row in rows})


def plan_batch(
    train: Train,
    trained_N: NDArray[np.bool_],
    minibatches: int,
    rank: int,
    ranks: int,
    budget: int,
    packed: bool = False,
) -> BatchPlan:
    """Return the plan of a batch for data-parallel rank ``rank`` of ``ranks``.

    Args:
        train: the batch's scalars.
        trained_N: whether each sample is trained.
        minibatches: optimizer updates of the batch.
        rank: data-parallel rank.
        ranks: number of data-parallel ranks.
        budget: maximum number of positions of a microbatch.
        packed: whether rows of a microbatch are computed without padding.
    """
    rows = sequences(train.samples)
    tokens, owners = [row.tokens for row in rows], [row.sample for row in rows]
    branched = len(rows) > len(train.samples)
    parts = split_minibatches([sample.group for sample in train.samples], minibatches)
    of_parts = [[i for i in part if trained_N[i]] for part in parts]
    plans = []
    for samples in of_parts:
        if branched:
            chosen = set(samples)
            own = [row for row, sample in enumerate(owners) if sample in chosen]
            plans.append(assign_samples(own, owners, tokens, ranks, budget, packed))
        else:
            plans.append(assign(samples, tokens, ranks, budget, packed))
    slowest = sum(max(positions(microbatches, tokens, packed) for microbatches in plan) for plan in plans)
    total = sum(length for length, sample in zip(tokens, owners, strict=True) if trained_N[sample])
    lockstep = slowest * ranks / total if total else 1.0
    mine = [plan[rank] for plan in plans]
    return BatchPlan(train, trained_N, of_parts[0], parts, mine, lockstep, packed)


def sequences(samples: Sequence[BatchSample]) -> list[BatchSequence]:
    """Return the sequences of all samples, in the order of the batch."""
    rows = []
    for i, sample in enumerate(samples):
        ends = [0, *itertools.accumulate(sample.sequences or [sample.total_tokens])]
        rows += [BatchSequence(i, start, end) for start, end in itertools.pairwise(ends)]
    return rows


def positions(microbatches: Sequence[Sequence[int]], tokens: Sequence[int], packed: bool = False) -> int:
    """Return the positions of microbatches: rows × the longest row, summed; of packed rows the tokens.

    Args:
        microbatches: samples of each.
        tokens: length of each sample of the batch.
        packed: whether rows of a microbatch are computed without padding.
    """
    if packed:
        return sum(tokens[i] for samples in microbatches for i in samples)
    return sum(len(samples) * max((tokens[i] for i in samples), default=0) for samples in microbatches)


def assign(
    samples: Sequence[int], tokens: Sequence[int], ranks: int, budget: int, packed: bool = False
) -> list[list[list[int]]]:
    """Return each rank's microbatches of one minibatch, the same number for all ranks.

    Microbatches are runs of the samples in descending length. For a number of microbatches a rank, the least limit of
    positions is taken with which so many suffice: then nearly all microbatches have this size. The largest go first, to
    the rank with the fewest positions. Of several numbers the one is taken for which the slowest rank has least to do.
    A rank without samples for all its microbatches gets empty ones.

    Args:
        samples: of the minibatch.
        tokens: length of each sample of the batch.
        ranks: data-parallel ranks.
        budget: maximum number of positions of a microbatch; a longer sample is a microbatch of its own.
        packed: whether rows of a microbatch are computed without padding.
    """
    order = sorted(samples, key=lambda i: (-tokens[i], i))
    ordered = [tokens[i] for i in order]
    fewest = max(1, -(-len(_cut(ordered, budget, packed)) // ranks))
    most = max(fewest, min(fewest + EXTRA_MICROBATCHES, -(-len(order) // ranks)))
    plans = []
    for count in range(fewest, most + 1):
        limit = _least_limit(ordered, count * ranks, budget, packed)
        runs = [order[start:end] for start, end in itertools.pairwise([*_cut(ordered, limit, packed), len(order)])]
        plans.append(_deal(runs, tokens, ranks, count, packed))
    return min(plans, key=lambda plan: _cost(plan, tokens, packed))


def assign_samples(
    rows: Sequence[int],
    owners: Sequence[int],
    tokens: Sequence[int],
    ranks: int,
    budget: int,
    packed: bool = False,
) -> list[list[list[int]]]:
    """Return each rank's microbatches of one minibatch, of samples of several rows; the same number for all ranks.

    All rows of a sample are on one rank: the largest sample goes first, to the rank with the fewest tokens. Each rank
    cuts its rows as :func:`assign` does.

    Args:
        rows: of the minibatch.
        owners: sample of each row of the batch.
        tokens: length of each row of the batch.
        ranks: data-parallel ranks.
        budget: maximum number of positions of a microbatch; a longer row is a microbatch of its own.
        packed: whether rows of a microbatch are computed without padding.
    """
    of_samples: dict[int, list[int]] = {}
    for row in rows:
        of_samples.setdefault(owners[row], []).append(row)
    size = {sample: sum(tokens[row] for row in own) for sample, own in of_samples.items()}
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for sample in sorted(of_samples, key=lambda sample: (-size[sample], sample)):
        rank = load.index(min(load))
        dealt[rank] += of_samples[sample]
        load[rank] += size[sample]
    plans = [assign(own, tokens, 1, budget, packed)[0] for own in dealt]
    count = max(map(len, plans))
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]


def _cut(ordered: Sequence[int], limit: int, packed: bool) -> list[int]:
    """Return where each microbatch starts if every one is filled up to ``limit`` positions.

    Args:
        ordered: lengths in descending order.
        limit: maximum number of positions; a longer sample is alone.
        packed: whether rows of a microbatch are computed without padding. Results of the loss are padded, so the padded
            positions are limited too.
    """
    sums = [0, *itertools.accumulate(ordered)]
    starts, start = [], 0
    while start < len(ordered):
        starts.append(start)
        rows = (PADDED_LIMIT if packed else 1) * limit // max(1, ordered[start])
        if packed:
            rows = min(rows, bisect.bisect_right(sums, sums[start] + limit) - 1 - start)
        start += max(1, rows)
    return starts


def _least_limit(ordered: Sequence[int], most: int, budget: int, packed: bool) -> int:
    """Return the least limit of positions, up to ``budget``, that cuts into at most ``most`` microbatches."""
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(ordered, middle, packed)) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def _deal(
    runs: Sequence[list[int]], tokens: Sequence[int], ranks: int, count: int, packed: bool
) -> list[list[list[int]]]:
    """Return ``count`` microbatches for each rank: the largest first, to the rank with the fewest positions."""
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for run in sorted(runs, key=lambda run: -positions([run], tokens, packed)):
        rank = min((r for r in range(ranks) if len(plan[r]) < count), key=lambda r: load[r])
        plan[rank].append(run)
        load[rank] += positions([run], tokens, packed)
    return [mine + [[] for _ in range(count - len(mine))] for mine in plan]


def _cost(plan: Sequence[Sequence[Sequence[int]]], tokens: Sequence[int], packed: bool) -> int:
    """Return twice the mean of two bounds of a plan's duration, in positions.

    If ranks waited for each other only at the end of the minibatch, it would take as long as the slowest rank; if they
    waited after each microbatch, as long as the sum of the slowest of each. FSDP is in between.
    """
    size = [[positions([samples], tokens, packed) for samples in microbatches] for microbatches in plan]
    slots = sum(map(max, zip(*size, strict=True)))
    return max(map(sum, size)) + slots + 2 * MICROBATCH_POSITIONS * len(size[0])


def split_minibatches(groups: Sequence[str], minibatches: int) -> list[list[int]]:
    """Return the samples of each minibatch, in the order of the batch: whole groups if there are enough groups.

    Args:
        groups: group of each sample; members are adjacent.
        minibatches: number of minibatches, at most the number of samples.
    """
    starts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
    if len(starts) < minibatches:
        starts = list(range(len(groups)))
    bounds = [starts[part[0]] for part in np.array_split(np.arange(len(starts)), minibatches)] + [len(groups)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
