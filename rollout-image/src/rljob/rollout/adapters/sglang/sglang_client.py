"""Client of an SGLang server, by its native routes; rljob's receiver is behind those that change weights.

- SGLang pauses in two ways: ``retract`` takes the requests out of the batch, to compute their KV cache again with the
  new weights; ``in_place`` leaves them and their cache where they are. Its own mode ``abort`` polls once a second, and
  it has none that waits for requests. Both are done here: this client holds new requests back, ends or awaits those
  in flight, and then pauses.
- A prefix in the cache belongs to the version of the request that computed it (``extra_key``).
- A token id beyond the vocabulary would end the server, so such a request is refused here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec
from tokenizers import Tokenizer

from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError, GenerationOutput, unpack_ints
from rljob.rollout.adapters.http_client import EngineHttp
from rljob.rollout.adapters.sglang.sglang_orders import SglangGroup, SglangRound, as_text
from rljob.rollout.adapters.version_label import labelled_version, version_label
from rljob.rollout.answer_end import AnswerEnd

PAUSE_MODES = {"keep": "retract", "keepStaleCache": "in_place", "abort": "retract", "wait": "retract"}
"""inFlight → SGLang's mode."""
ENDED_BEFORE = ("abort", "wait")
"""Values of inFlight in which no request is in flight during an update."""
ABORT_AGAIN_SECONDS = 0.1  # an abort may overtake its request
NO_NUMBER = -9999.0
"""Replaces null, which SGLang's JSON has for nan and infinity."""


class _Finish(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_Logprobs = list[tuple[float | None, int, str | None]]  # log-probability, token id, text


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: _Logprobs
    input_token_logprobs: _Logprobs = []
    weight_versions: list[_Span] = []


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _Answer(msgspec.Struct):
    """Answer to a change of the weights."""

    message: str


_generated = msgspec.json.Decoder(_Generated)
_answer = msgspec.json.Decoder(_Answer)


class SglangClient:
    """A running SGLang server; see :class:`~rljob.rollout.adapters.base.EngineClient`. Needs a running event loop.

    Args:
        url: of the server, without a trailing slash.
        key: of this start of the server.
        vocabulary: token ids are below this number; None if it is not known.
        tokenizer: returns the model's tokenizer, which finds stop strings.
    """

    def __init__(self, url: str, key: str, vocabulary: int | None, tokenizer: Callable[[], Tokenizer]) -> None:
        self._http = EngineHttp("SGLang", url, key)
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._version = "default"  # SGLang's label of the initial weights
        self._in_flight: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._keeps_cache = False

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def healthy(self) -> bool:
        """Return whether the server answers: it listens once its scheduler is ready, and ends with it."""
        return await self._http.answers("/ping")

    async def responsive(self) -> bool:
        """Return True once the scheduler itself has answered; False if it is dead."""
        return await self._http.answers("/v1/loads")

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> GenerationOutput:
        """Generate one completion. With stop strings or a minimum length SGLang generates all tokens, and what follows
        the end of the answer is cut off: it has no tokenizer, and knows no tokens of an earlier request."""
        cut = bool(sampling.stop or sampling.min_tokens)
        prompt = unpack_ints(token_ids)
        self._check_tokens(prompt)
        await self._open.wait()
        body = {
            "rid": request,
            "input_ids": prompt,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_tokens,
                "stop_token_ids": [] if cut else sampling.stop_token_ids,
                "ignore_eos": cut
                or not sampling.stop_token_ids,  # it would ignore these too; the scheduler knows no others
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
            },
            "return_logprob": True,
            "extra_key": self._version,
        }
        self._in_flight.add(request)
        self._idle.clear()
        try:
            reply = await self._http.call("/generate", body, _generated)
        finally:
            self._in_flight.discard(request)
            if not self._in_flight:
                self._idle.set()
        length = _length(AnswerEnd(sampling, prompt, self._tokenizer), reply.output_ids) if cut else None
        return _output(reply, sampling, length)

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop requests."""
        await asyncio.gather(*(self._http.post("/abort_request", {"rid": request}) for request in requests))

    async def join(self, update: PrepareWeights, seconds: float) -> None:
        """Join the update's weight group; the receiver leaves the previous group."""
        body = {
            "master_address": update.address,
            "master_port": update.port,
            "rank_offset": 1,
            "world_size": update.world_size,
            "backend": update.transport,
            "group_name": as_text(SglangGroup(update.group, update.bucket_bytes, seconds)),
        }
        await self._http.post("/init_weights_update_group", body)

    async def pause(self, in_flight: str) -> None:
        """Stop generating."""
        self._open.clear()
        while in_flight in ENDED_BEFORE and self._in_flight:
            if in_flight == "abort":
                await self.abort(list(self._in_flight))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), ABORT_AGAIN_SECONDS)
        self._keeps_cache = in_flight == "keepStaleCache"
        await self._http.post("/pause_generation", {"mode": PAUSE_MODES[in_flight]})

    async def receive(self, update: PrepareWeights, seconds: float) -> str:
        """Receive, load and commit the update's weights; return their digest."""
        version = version_label(update)
        body = {
            "names": [meta.name for meta in update.parameters],
            "dtypes": [meta.dtype for meta in update.parameters],
            "shapes": [meta.shape for meta in update.parameters],
            "group_name": as_text(SglangRound(seconds)),
            "flush_cache": not self._keeps_cache,
            "weight_version": version,
        }
        reply = await self._http.call("/update_weights_from_distributed", body, _answer)
        self._version = version
        return reply.message.partition(" ")[0]  # SGLang adds a sentence to the receiver's answer

    async def resume(self) -> None:
        """Continue generating."""
        await self._http.post("/continue_generation", {})
        self._open.set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""
        self._check_tokens(token_ids)
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": self._version,
        }
        reply = await self._http.call("/generate", body, _generated)
        return _numbers(reply.meta_info.input_token_logprobs[1:])

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if self._vocabulary is not None and any(not 0 <= token < self._vocabulary for token in token_ids):
            raise BadRequestError(f"the prompt has a token id outside the model's vocabulary of {self._vocabulary}")


def _numbers(logprobs: _Logprobs) -> list[float]:
    return [NO_NUMBER if logprob is None else logprob for logprob, _, _ in logprobs]


def _length(end: AnswerEnd, tokens: Sequence[int]) -> int | None:
    """Return the number of tokens up to the end of the answer; None if it does not end."""
    return next((count for count, token in enumerate(tokens, 1) if end.is_at(token)), None)


def _output(reply: _Generated, sampling: SamplingParams, length: int | None) -> GenerationOutput:
    """Return SGLang's answer as an output; ``length``: tokens after which it ends, None: all.

    Raises:
        EngineGoneError: it has other numbers of tokens, log-probabilities and versions.
    """
    tokens, meta = reply.output_ids, reply.meta_info
    spans = [VersionSpan(labelled_version(span.version), span.start, span.end) for span in meta.weight_versions]
    spans = [span for span in spans if span.start < span.end]
    bounds = [0, *(span.end for span in spans)]
    if not len(tokens) == len(meta.output_token_logprobs) == bounds[-1] or [s.start for s in spans] != bounds[:-1]:
        raise EngineGoneError(
            f"SGLang answered {len(tokens)} tokens with {len(meta.output_token_logprobs)} log-probabilities and the "
            f"versions {meta.weight_versions}"
        )
    finish = meta.finish_reason.type
    if length is not None:
        spans = [VersionSpan(span.version, span.start, min(span.end, length)) for span in spans if span.start < length]
        return GenerationOutput.pack(tokens[:length], _numbers(meta.output_token_logprobs[:length]), spans, "stop")
    if finish == "length" and tokens and tokens[-1] in sampling.stop_token_ids:
        finish = "stop"  # the last token that was allowed
    return GenerationOutput.pack(tokens, _numbers(meta.output_token_logprobs), spans, finish)
