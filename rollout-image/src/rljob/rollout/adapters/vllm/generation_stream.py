"""Generation requests of the agent in one WebSocket connection to vLLM's server: frames of many requests and outputs.

vLLM's own route takes an HTTP request for each sample; parsing and validating it costs more time than a short answer.
Both ends are here: :class:`GenerationStream` in the agent, and :func:`serve`, which
:mod:`rljob.rollout.adapters.vllm.update_routes` calls in the server. A frame is a msgpack array of messages. Requests
run concurrently, and each has one answer: a StreamOutput or a StreamFailure. The end of the connection ends all its
requests. :func:`score` is no request of the stream; the routes call it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from rljob.protocol.agent_protocol import SamplingParams
from rljob.protocol.frames import DECODE_ERRORS
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError, unpack_ints
from rljob.rollout.answer_end import AnswerEnd, load_tokenizer

GENERATE = "/rljob/generate"
FRAME_BYTES = 4 << 20
"""Prompts of a frame, so that it is smaller than the server's limit (16 MiB) unless one prompt is longer."""
LEAST = -9999.0
"""Replaces smaller log-probabilities and nan, as in vLLM's own route."""


class StreamRequest(msgspec.Struct, tag=True, gc=False):
    """A request.

    Args:
        name: never used twice.
        token_ids: prompt, int32.
        cache_salt: prefixes are shared only between requests with the same one.
        sampling: as in the agent's request.
    """

    name: str
    token_ids: bytes
    cache_salt: str
    sampling: SamplingParams


class StreamAbort(msgspec.Struct, tag=True, gc=False):
    """End requests: each is answered with the tokens generated so far. Unknown names are ignored.

    Args:
        name: of this message, whose answer is a StreamAborted.
        names: of the requests.
    """

    name: str
    names: list[str]


class StreamAborted(msgspec.Struct, tag=True, gc=False):
    """The answer to an abort: the engine has got it."""

    name: str


class StreamOutput(msgspec.Struct, tag=True, gc=False):
    """The answer to a request.

    Args:
        name: of the request.
        token_ids: int32.
        logprobs: float32.
        versions: label of the weights, start and end of each span of tokens.
        finish: stop, length or abort.
    """

    name: str
    token_ids: bytes
    logprobs: bytes
    versions: list[tuple[str, int, int]]
    finish: str


class StreamFailure(msgspec.Struct, tag=True, gc=False):
    """The answer to a request that was not carried out; ``bad``: its content is the reason."""

    name: str
    reason: str
    bad: bool


_requests = msgspec.msgpack.Decoder(list[StreamRequest | StreamAbort])
_answers = msgspec.msgpack.Decoder(list[StreamOutput | StreamAborted | StreamFailure])
_encode = msgspec.msgpack.Encoder().encode


class GenerationStream:
    """The agent's end. It connects at the first request, and again after the connection has ended.

    Args:
        connect: opens the WebSocket connection.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._open: dict[str, asyncio.Future[Any]] = {}
        self._unsent: list[StreamRequest | StreamAbort] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._aborts = 0

    async def generate(self, request: StreamRequest) -> StreamOutput:
        """Return the answer to a request; a cancelled call aborts it.

        Raises:
            BadRequestError: the server rejects the request's content.
            EngineGoneError: the request was not carried out, or the connection ended.
        """
        try:
            output: StreamOutput = await self._call(request)
            return output
        except asyncio.CancelledError:
            if self._task is not None:
                self._send(StreamAbort("", [request.name]))
            raise

    async def abort(self, names: Sequence[str]) -> None:
        """End requests; each is answered.

        Raises:
            EngineGoneError: the engine is dead, or the connection ended.
        """
        self._aborts += 1
        await self._call(StreamAbort(f"abort {self._aborts}", list(names)))

    async def close(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _call(self, message: StreamRequest | StreamAbort) -> Any:
        answer = self._open[message.name] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await answer
        finally:
            self._open.pop(message.name, None)

    def _send(self, message: StreamRequest | StreamAbort) -> None:
        self._unsent.append(message)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Connect, and send and receive until the connection ends; then fail the open requests."""
        problem = "the connection was closed"
        try:
            async with self._connect() as socket:
                sending = asyncio.create_task(self._send_frames(socket))
                try:
                    async for frame in socket:
                        self._receive(frame.data)
                finally:
                    sending.cancel()
        except (aiohttp.ClientError, OSError, *DECODE_ERRORS) as error:
            problem = str(error) or type(error).__name__
        finally:
            self._task = None
            self._unsent.clear()
            for answer in self._open.values():
                if not answer.done():
                    answer.set_exception(EngineGoneError(f"vLLM does not answer: {problem}"))

    async def _send_frames(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for frame in _frames(self._unsent):
                with contextlib.suppress(ConnectionError):  # the receiving end reports it
                    await socket.send_bytes(_encode(frame))

    def _receive(self, frame: Any) -> None:
        for message in _answers.decode(frame):
            answer = self._open.get(message.name)
            if answer is None or answer.done():
                continue
            if not isinstance(message, StreamFailure):
                answer.set_result(message)
            else:
                kind = BadRequestError if message.bad else EngineGoneError
                answer.set_exception(kind(f"vLLM answered: {message.reason}"))


def _frames(unsent: list[StreamRequest | StreamAbort]) -> list[list[StreamRequest | StreamAbort]]:
    """Remove all messages and return them as frames."""
    frames: list[list[StreamRequest | StreamAbort]] = []
    room = 0
    for message in unsent:
        size = len(message.token_ids) if isinstance(message, StreamRequest) else 0
        if not frames or size > room:
            frames.append([])
            room = FRAME_BYTES
        frames[-1].append(message)
        room -= size
    unsent.clear()
    return frames


async def serve(engine: Any, receive: Any, send: Any) -> None:
    """Serve one connection in vLLM's server until it ends.

    Args:
        engine: vLLM's AsyncLLM.
        receive: of the ASGI connection.
        send: of the ASGI connection.
    """
    await receive()  # websocket.connect
    await send({"type": "websocket.accept"})
    server = _Server(engine, send)
    try:
        while (event := await receive())["type"] == "websocket.receive":
            for message in _requests.decode(event["bytes"]):
                await server.handle(message)
    finally:
        server.end()


class _Server:
    """Runs the requests of one connection, each in a task; answers that are ready together share a frame."""

    def __init__(self, engine: Any, send: Any) -> None:
        self._engine = engine
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ready: list[StreamOutput | StreamAborted | StreamFailure] = []
        self._sending: asyncio.Task[None] | None = None

    async def handle(self, message: StreamRequest | StreamAbort) -> None:
        if isinstance(message, StreamRequest):
            self._tasks[message.name] = asyncio.create_task(self._run(message))
            return
        if self._engine.errored:  # its abort() would say nothing
            self._answer(StreamFailure(message.name, "the engine is dead", False))
            return
        await self._engine.abort([name for name in message.names if name in self._tasks])
        self._answer(StreamAborted(message.name))

    def end(self) -> None:
        """StreamAbort all requests."""
        for task in (*self._tasks.values(), self._sending):
            if task is not None:
                task.cancel()

    async def _run(self, request: StreamRequest) -> None:
        try:
            answer: StreamOutput | StreamFailure = await _generate(self._engine, request)
        except Exception as error:  # noqa: BLE001 of the engine; the agent receives and logs it
            answer = StreamFailure(request.name, f"{type(error).__name__}: {error}", _is_bad_request(error))
        del self._tasks[request.name]
        self._answer(answer)

    def _answer(self, answer: StreamOutput | StreamAborted | StreamFailure) -> None:
        self._ready.append(answer)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_ready())

    async def _send_ready(self) -> None:
        try:
            while self._ready:
                ready, self._ready = self._ready, []
                await self._send({"type": "websocket.send", "bytes": _encode(ready)})
        finally:
            self._sending = None


async def _generate(engine: Any, request: StreamRequest) -> StreamOutput:
    """Generate an answer. vLLM itself ends it at stop tokens, unless there are stop strings or a minimum length: it
    cannot know the tokens of an answer that another engine began, and its min_tokens changes the distribution."""
    sampling, prompt = request.sampling, unpack_ints(request.token_ids)
    if not sampling.stop and not sampling.min_tokens:
        (output,) = [output async for output in _outputs(engine, request, prompt, streamed=False)]
        return _stream_output(request.name, output.token_ids, output.logprobs.logprobs, output)
    end = AnswerEnd(sampling, prompt, lambda: load_tokenizer(engine.model_config.model))
    tokens: list[int] = []
    logprobs: list[float] = []
    ended = 0  # number of tokens up to the end of the answer; 0: not found yet
    async for output in _outputs(engine, request, prompt, streamed=True):
        new = list(output.token_ids)
        tokens += new
        logprobs += output.logprobs.logprobs if output.logprobs is not None else []
        if not ended:
            before = len(tokens) - len(new)
            ended = next((before + i for i, token in enumerate(new, 1) if end.is_at(token)), 0)
            if ended and output.finish_reason is None:
                await engine.abort(request.name)
    if ended:
        output.finish_reason = "stop"
        return _stream_output(request.name, tokens[:ended], logprobs[:ended], output)
    return _stream_output(request.name, tokens, logprobs, output)


async def _outputs(engine: Any, request: StreamRequest, prompt: list[int], streamed: bool) -> AsyncIterator[Any]:
    """Yield the outputs of vLLM. ``streamed``: the new tokens of each step, without an end at stop tokens."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSampling

    sampling = VllmSampling(
        temperature=request.sampling.temperature,
        max_tokens=request.sampling.max_tokens,
        stop_token_ids=[] if streamed else request.sampling.stop_token_ids,
        ignore_eos=True,  # stop_token_ids are complete
        seed=request.sampling.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )
    tokens = tokens_input(prompt, cache_salt=request.cache_salt)
    async for result in engine.generate(tokens, sampling, request.name):
        (output,) = result.outputs
        if output.finish_reason == "error":
            raise RuntimeError("the engine failed the request")
        yield output


def _stream_output(name: str, token_ids: Sequence[int], logprobs: Sequence[float], last: Any) -> StreamOutput:
    """Return the answer with these tokens; ``last``: the last output of vLLM."""
    count = len(token_ids)
    values = [value if value > LEAST else LEAST for value in logprobs]
    assert len(values) == count, "one for each token"
    spans = [(span.version, span.start, min(span.end, count)) for span in last.weight_versions or ()]
    return StreamOutput(
        name,
        array("i", token_ids).tobytes(),
        array("f", values).tobytes(),
        [span for span in spans if span[1] < span[2]],
        last.finish_reason or "stop",
    )


async def score(engine: Any, token_ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first, at temperature 1, under the current weights.

    Args:
        engine: vLLM's AsyncLLM.
        token_ids: at least one.

    Raises:
        RuntimeError: the engine failed the request. Any other error of vLLM is raised too.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,  # with it vLLM reads no cached prefixes
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    results = engine.generate(tokens_input(token_ids), sampling, f"score-{uuid.uuid4().hex}")
    *_, result = [result async for result in results]
    if result.prompt_logprobs is None:
        raise RuntimeError("the engine failed the request")
    pairs = zip(token_ids, result.prompt_logprobs, strict=True)
    logprobs = [entry[token].logprob for token, entry in pairs if entry is not None]
    return [value if value > LEAST else LEAST for value in logprobs]


def _is_bad_request(error: Exception) -> bool:
    from vllm.exceptions import VLLMClientError

    return isinstance(error, VLLMClientError | ValueError)
