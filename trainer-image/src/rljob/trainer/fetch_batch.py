"""Fetches a rank's share of a batch from the coordinator and checks it against the scalars."""

from __future__ import annotations

import http.client
import itertools
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from rljob.protocol.backoff import Backoff
from rljob.protocol.batch_samples import BatchSample, SampleTokens
from rljob.protocol.frames import DECODE_ERRORS
from rljob.protocol.score_messages import add_up
from rljob.protocol.shards import encode_selection
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.rewards import token_rewards
from rljob.trainer.batch import Row
from rljob.trainer.errors import SupersededError, UnrecoverableError

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 5.0
REQUEST_TIMEOUT_SECONDS = 60.0
NOT_READY = (502, 503, 504)  # retried without limit; other statuses from 500 on are failures
SERVER_ERRORS = 6  # tolerated failures: the coordinator may have been killed during a response
BYTES_PER_TOKEN = 96  # 8 for the token; the rest for an observation, an answer and a version span per token
BYTES_PER_SAMPLE = 4096

_shard_decoder = msgspec.msgpack.Decoder(list[SampleTokens])
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the coordinator is never behind a proxy


def pull_shard(coordinator: str, token: str, train: Train, indices: Sequence[int]) -> dict[int, Row]:
    """Return the samples at ``indices`` of a batch by their index; retry while the coordinator is unavailable.

    Args:
        coordinator: its address.
        token: the trainer's token.
        train: the command whose batch is pulled.
        indices: in the order of the batch; without any, nothing is requested.

    Raises:
        SupersededError: the coordinator knows a higher incarnation.
        UnrecoverableError: the coordinator has no such batch, or its shard does not match the scalars.
    """
    if not indices:
        return {}
    url = f"{coordinator.rstrip('/')}/v1/batches/{train.step}/shard?incarnation={train.incarnation}"
    limit = sum(BYTES_PER_TOKEN * train.samples[i].total_tokens + BYTES_PER_SAMPLE for i in indices) + BYTES_PER_SAMPLE
    body = encode_selection(indices, len(train.samples))
    return check_shard(decode_shard(_post(url, token, body), limit), train.samples, indices)


def _post(url: str, token: str, body: bytes) -> bytes:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, body, headers)
    backoff, failures = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS), 0
    while True:
        try:
            with _opener.open(request, timeout=REQUEST_TIMEOUT_SECONDS) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code == 409:
                raise SupersededError("the coordinator serves batches to a higher incarnation") from None
            failures += error.code not in NOT_READY
            if error.code < 500 or failures > SERVER_ERRORS:
                raise UnrecoverableError(f"the coordinator does not serve {url}: HTTP {error.code}") from None
            log.info("coordinator not ready: HTTP %d", error.code)
        except (OSError, http.client.HTTPException) as error:
            log.info("no answer from the coordinator: %s", error)
        time.sleep(backoff.next())


def decode_shard(data: bytes, limit: int) -> list[SampleTokens]:
    """Return the samples of a compressed shard of at most ``limit`` decompressed bytes.

    Raises:
        UnrecoverableError: the data is not a shard, or exceeds ``limit``.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            plain = reader.read(limit + 1)
        if len(plain) > limit:
            raise UnrecoverableError(f"a shard is larger than the {limit} bytes that its samples can need")
        return _shard_decoder.decode(plain)
    except (zstandard.ZstdError, *DECODE_ERRORS) as error:
        raise UnrecoverableError(f"a shard cannot be read: {error}") from None


def check_shard(shard: list[SampleTokens], samples: list[BatchSample], indices: Sequence[int]) -> dict[int, Row]:
    """Return the rows of a shard by index in the batch.

    Raises:
        UnrecoverableError: samples, lengths, segments or rewards differ from those of ``indices`` in ``samples``.
    """
    expected = [samples[i].sample for i in indices]
    if [tokens.sample for tokens in shard] != expected:
        raise UnrecoverableError(f"a shard holds other samples than the {len(expected)} expected ones")
    return {i: _row(tokens, samples[i]) for i, tokens in zip(indices, shard, strict=True)}


def _row(tokens: SampleTokens, scalars: BatchSample) -> Row:
    _check_segments(tokens, scalars.total_tokens)
    mask_L = np.frombuffer(tokens.loss_mask, np.uint8).astype(np.bool_)
    row = Row(
        np.frombuffer(tokens.token_ids, "<i4").astype(np.int64),
        np.frombuffer(tokens.logprobs, "<f4").astype(np.float32),
        mask_L,
        token_rewards(tokens.segments, mask_L),
        tuple(segment.end for segment in tokens.segments if segment.kind == "model")[:-1],
        {role: _of_model(tokens, role, mask_L) for role in tokens.models},
    )
    lengths = [end - start for start, end in itertools.pairwise([0, *tokens.ends])]
    if lengths != scalars.sequences or (lengths and tokens.ends[-1] != scalars.total_tokens):
        raise UnrecoverableError(f"sample {scalars.sample}: its sequences are not those that the batch names")
    if not scalars.total_tokens == len(row.token_ids_L) == len(row.logprobs_L):
        raise UnrecoverableError(
            f"sample {scalars.sample} does not have the {scalars.total_tokens} tokens that the batch names"
        )
    if not np.isfinite(row.logprobs_L).all():
        raise UnrecoverableError(
            f"sample {scalars.sample}: an engine's log-probability is nan or infinite; the engine or its weights are "
            "damaged: check the GPUs, then resume from the last checkpoint"
        )
    starts = [0, *tokens.ends[:-1]]
    if mask_L.sum() != scalars.response_tokens or mask_L[:1].any() or mask_L[starts].any():
        raise UnrecoverableError(f"sample {scalars.sample}: its loss mask does not cover its response")
    if not add_up([segment.reward for segment in tokens.segments], scalars.reward):
        raise UnrecoverableError(f"sample {scalars.sample}: the rewards of its segments do not add up to its reward")
    return row


def _of_model(tokens: SampleTokens, role: str, mask_L: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the log-probabilities of a sample under a model of a frozen pool (L,).

    Raises:
        UnrecoverableError: they are not one for each token of the loss mask.
    """
    given_T, logprobs_L = np.frombuffer(tokens.models[role], "<f4"), np.zeros(len(mask_L), np.float32)
    if len(given_T) != mask_L.sum():
        raise UnrecoverableError(
            f"sample {tokens.sample}: its log-probabilities of the model {role} do not cover its response"
        )
    logprobs_L[mask_L] = given_T
    return logprobs_L


def _check_segments(tokens: SampleTokens, length: int) -> None:
    """Check that the segments cover ``length`` tokens in order.

    Raises:
        UnrecoverableError: the segments overlap, leave gaps or have another length.
    """
    end = 0
    for segment in tokens.segments:
        if segment.start != end or not segment.start <= segment.end <= length:
            raise UnrecoverableError(f"sample {tokens.sample}: its segments do not cover its tokens in order")
        end = segment.end
    if end != length:
        raise UnrecoverableError(f"sample {tokens.sample}: its segments do not cover the {length} tokens of the batch")
