"""A rank's share of a batch: pulled from the coordinator, checked against the scalars, cut into microbatches.

Shapes: B rows, L positions, K = L − first: the positions from the first that any row's model wrote.
"""

from __future__ import annotations

import http.client
import itertools
import logging
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from rljob.protocol.messages import BatchSample, SampleTokens, Train
from rljob.scheduling.shards import assign
from rljob.trainer.errors import SupersededError, UnrecoverableError

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 5.0
REQUEST_TIMEOUT_SECONDS = 60.0
BYTES_PER_TOKEN = 16  # 9 on the wire, with room for version spans
BYTES_PER_SAMPLE = 4096

_shard_decoder = msgspec.msgpack.Decoder(list[SampleTokens])
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the coordinator is never behind a proxy


@dataclass(frozen=True)
class Row:
    """Tokens of one sample."""

    token_ids_L: NDArray[np.int64]
    logprobs_L: NDArray[np.float32]
    mask_L: NDArray[np.bool_]  # where the model wrote


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass, padded on the right. Position k of the K ones predicts target k."""

    token_ids_BL: Tensor
    keep_K: Tensor  # positions whose logits are needed
    targets_BK: Tensor
    mask_BK: Tensor
    behavior_BK: Tensor  # the engine's log-probabilities
    temperature_B: Tensor


def lengths(samples: Sequence[BatchSample]) -> list[int]:
    """Return the length of each sample in tokens, prompt included."""
    return [sample.prompt_tokens + sample.response_tokens for sample in samples]


def pull_shard(coordinator: str, token: str, train: Train, rank: int, size: int) -> dict[int, Row]:
    """Return this rank's samples by their index in the batch, however long the coordinator is away.

    Args:
        coordinator: its address.
        token: the trainer's token.
        train: the command whose batch is pulled.
        rank: this data-parallel rank.
        size: data-parallel ranks.

    Raises:
        SupersededError: the coordinator knows a higher incarnation.
        UnrecoverableError: the coordinator has no such batch, or what it sends does not fit the scalars.
    """
    url = f"{coordinator.rstrip('/')}/v1/batches/{train.step}/shards/{rank}?of={size}&incarnation={train.incarnation}"
    indices = assign(lengths(train.samples), size)[rank]
    limit = sum(BYTES_PER_TOKEN * lengths(train.samples)[i] + BYTES_PER_SAMPLE for i in indices) + BYTES_PER_SAMPLE
    return check_shard(decode_shard(_get(url, token), limit), train.samples, indices)


def _get(url: str, token: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    backoff = FIRST_BACKOFF_SECONDS
    while True:
        try:
            with _opener.open(request, timeout=REQUEST_TIMEOUT_SECONDS) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code == 409:
                raise SupersededError("the coordinator serves batches to a higher incarnation") from None
            if error.code < 500:
                raise UnrecoverableError(f"the coordinator refuses {url}: HTTP {error.code}") from None
            log.info("coordinator not ready: HTTP %d", error.code)
        except (OSError, http.client.HTTPException) as error:
            log.info("no answer from the coordinator: %s", error)
        time.sleep(backoff * random.uniform(0.5, 1.0))
        backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)


def decode_shard(data: bytes, limit: int) -> list[SampleTokens]:
    """Return the samples of a compressed shard of at most ``limit`` decompressed bytes.

    Raises:
        UnrecoverableError: it is not a shard, or a larger one.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            plain = reader.read(limit + 1)
        if len(plain) > limit:
            raise UnrecoverableError(f"a shard is larger than the {limit} bytes its samples can need")
        return _shard_decoder.decode(plain)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise UnrecoverableError(f"a shard cannot be read: {error}") from None


def check_shard(shard: list[SampleTokens], samples: list[BatchSample], indices: list[int]) -> dict[int, Row]:
    """Return the rows of a shard by index in the batch.

    Raises:
        UnrecoverableError: samples, lengths or masks differ from what ``samples`` says of ``indices``.
    """
    expected = [samples[i].sample for i in indices]
    if [tokens.sample for tokens in shard] != expected:
        raise UnrecoverableError(f"a shard holds other samples than the {len(expected)} it should")
    return {i: _row(tokens, samples[i]) for i, tokens in zip(indices, shard, strict=True)}


def _row(tokens: SampleTokens, scalars: BatchSample) -> Row:
    row = Row(
        np.frombuffer(tokens.token_ids, "<i4").astype(np.int64),
        np.frombuffer(tokens.logprobs, "<f4").astype(np.float32),
        np.frombuffer(tokens.loss_mask, np.uint8) != 0,
    )
    length = scalars.prompt_tokens + scalars.response_tokens
    if not length == len(row.token_ids_L) == len(row.logprobs_L) == len(row.mask_L):
        raise UnrecoverableError(f"sample {scalars.sample} does not have the {length} tokens the batch says")
    if row.mask_L.sum() != scalars.response_tokens or row.mask_L[:1].any():
        raise UnrecoverableError(f"sample {scalars.sample}: its loss mask does not cover its response")
    return row


def plan_microbatches(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return ``indices`` cut into microbatches, longest samples first.

    Args:
        indices: samples of one rank.
        lengths: tokens of each sample of the batch.
        budget: padded tokens of a microbatch; a longer sample goes alone.
    """
    plan: list[list[int]] = []
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        if plan and lengths[plan[-1][0]] * (len(plan[-1]) + 1) <= budget:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def plan_ranks(minibatch: Sequence[int], lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Return for each rank its microbatches of a minibatch, the same number for all.

    A rank with fewer takes part in the collectives of every forward and backward pass through empty ones.

    Args:
        minibatch: samples of the global minibatch.
        lengths: tokens of each sample of the batch.
        ranks: data-parallel ranks.
        budget: padded tokens of a microbatch.
    """
    chosen = set(minibatch)
    plans = [plan_microbatches([i for i in shard if i in chosen], lengths, budget) for shard in assign(lengths, ranks)]
    most = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def split_minibatches(groups: Sequence[str], minibatches: int) -> list[list[int]]:
    """Return the samples of each minibatch, in the batch's order: whole groups while there are enough of them.

    Args:
        groups: group of each sample; members are neighbours.
        minibatches: parts to make, at most as many as there are samples.
    """
    starts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
    if len(starts) < minibatches:
        starts = list(range(len(groups)))
    bounds = [starts[part[0]] for part in np.array_split(np.arange(len(starts)), minibatches)] + [len(groups)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]


def collate(rows: Sequence[Row], temperatures: Sequence[float], device: torch.device) -> Microbatch:
    """Return the rows as tensors on ``device``; with no rows, one of two tokens that the model did not write."""
    if not rows:
        empty = Row(np.zeros(2, np.int64), np.zeros(2, np.float32), np.zeros(2, np.bool_))
        rows, temperatures = [empty], [1.0]
    length = max(2, *(len(row.token_ids_L) for row in rows))
    token_ids_BL = np.zeros((len(rows), length), np.int64)
    behavior_BL = np.zeros((len(rows), length), np.float32)
    mask_BL = np.zeros((len(rows), length), np.bool_)
    for b, row in enumerate(rows):
        token_ids_BL[b, : len(row.token_ids_L)] = row.token_ids_L
        behavior_BL[b, : len(row.logprobs_L)] = row.logprobs_L
        mask_BL[b, : len(row.mask_L)] = row.mask_L
    first = int(mask_BL.any(axis=0).argmax()) if mask_BL.any() else length - 1

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Microbatch(
        token_ids_BL=tensor(token_ids_BL),
        keep_K=torch.arange(first - 1, length - 1, device=device),
        targets_BK=tensor(token_ids_BL[:, first:]),
        mask_BK=tensor(mask_BL[:, first:]),
        behavior_BK=tensor(behavior_BL[:, first:]),
        temperature_B=torch.tensor(list(temperatures), dtype=torch.float32, device=device),
    )
