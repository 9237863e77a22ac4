"""The interface between the agent and an inference engine.

An engine is an :class:`Adapter`, which runs in the agent, and a receiver, which runs in the engine's server. The agent
knows engines through the types of this module only; `rollouts[].engine` names the adapter's class: a built-in name, or
``module:class`` of a user's own package that is installed beside rljob-rollout. ``rljob.rollout.conformance`` checks
all guarantees below against a running server; ``rollout-image/tests/torch_engine`` is a small complete engine.

The agent does the following for every engine, so adapters need no code for it:

- The supervisor chooses the port and the key, starts the server as leader of a session with a separate TMPDIR, logs its
  output, and kills its process group. The server dies with the agent. A server that ends is restarted with back-off;
  exit code 2 means that it refuses its settings, and then the agent exits.
- The request table sends at most ``maxConcurrency`` requests at a time and none during a weight update. If none of them
  ends for half of ``failurePolicy.stallSeconds``, the agent asks for one token beside them; without it, the server is
  replaced.
- The weight updater calls ``join`` (if the group is new), ``pause``, ``receive``, ``resume`` and ``score`` in this
  order, one update at a time. After a failed ``receive`` the engine stays paused until a ``receive`` succeeds. A client
  may carry out all steps after ``join`` in one call of its server (:mod:`rljob.rollout.adapters.update_steps`).

The receiver: :class:`rljob.transfer.receiver.WeightReceiver` joins the weight group and receives tensors; the engine's
code passes it a function that loads them. An engine has ``parallelism.workers`` receivers, one in each process that
holds weights: each receives all tensors and loads its part.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import VersionSpan

INITIAL_VERSION = -1
"""Version of tokens that were sampled from the weights that the server started with."""


class EngineError(Exception):
    """The engine did not carry out a call."""


class BadRequestError(EngineError):
    """The engine rejects the content of a request; every engine would. The sample fails; the engine is not checked."""


class EngineGoneError(EngineError):
    """The server does not answer, or reports an internal failure. The agent then calls :meth:`EngineClient.healthy` and
    replaces a server that is not healthy."""


@contextmanager
def engine_errors() -> Iterator[None]:
    """Convert exceptions of an engine's client to EngineGoneError, except EngineError."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # user code may raise anything; the agent handles EngineError only
        raise EngineGoneError(f"the engine's client raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Launch:
    """How to start a server.

    Args:
        command: program and arguments. Every user of the machine can read them, so the key belongs in ``environment``.
        environment: variables added to the agent's own; None removes a variable.
    """

    command: list[str]
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The tokens that a request produced; the prompt is not repeated.

    Args:
        token_ids: int32.
        logprobs: float32, one per token: the log-probability of the token in the distribution it was sampled from,
            at the request's temperature; at temperature 0 in the distribution of temperature 1.
        spans: policy versions of the tokens, ascending and without gaps, from 0 to the number of tokens; empty without
            tokens. A token belongs to the version whose logits it was sampled from.
        finish: ``stop`` (the answer ends with the last token), ``length`` (``max_tokens`` are reached) or ``abort``.
    """

    token_ids: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    finish: str

    @classmethod
    def pack(
        cls, token_ids: Iterable[int], logprobs: Iterable[float], spans: list[VersionSpan], finish: str
    ) -> GenerationOutput:
        """Return an output from plain numbers, packed as int32 and float32."""
        return cls(array("i", token_ids).tobytes(), array("f", logprobs).tobytes(), spans, finish)


class EngineClient(Protocol):
    """A connection to one running server.

    Calls run concurrently, but :meth:`join`, :meth:`pause`, :meth:`receive`, :meth:`resume` and :meth:`score` one after
    the other (several :meth:`score` at a time). The agent may cancel every call at any time; a cancelled call leaves
    the client usable. Every method except :meth:`close`, :meth:`healthy` and :meth:`responsive` raises EngineGoneError
    if the server does not answer or reports an internal failure. Any other exception of a method is handled like
    EngineGoneError.
    """

    async def close(self) -> None:
        """Close all connections. The server may be dead already."""

    async def healthy(self) -> bool:
        """Return whether the server accepts requests and its engine is alive; never raises.

        Called every 0.1 s during the start, later after failures. A paused engine is healthy.
        """

    async def responsive(self) -> bool:
        """Return True once the engine itself, not only its HTTP server, has answered; False if it is dead.

        May wait as long as the engine is blocked: the caller sets the time limit. A paused engine is responsive.
        """

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> GenerationOutput:
        """Generate one completion.

        Every generated token is returned, the stop token included. ``sampling.stop_token_ids`` are the only stop
        tokens: the model's own end of sequence does not end the completion. The token that completes one of
        ``sampling.stop`` ends it too. :class:`rljob.rollout.answer_end.AnswerEnd` finds both, with ``min_tokens`` and
        across an abort; the probabilities of tokens are not changed. Filters such as top-p are off.
        Temperature 0 is greedy: each token is the most likely one. Equal
        ``seed``, prompt, weights and load give equal tokens if the engine can seed a request; otherwise it ignores
        ``seed``.
        During a pause the call waits for :meth:`resume`.

        Args:
            request: name of the request for :meth:`abort`; the agent never uses a name twice with one server.
            token_ids: prompt, int32. After an abort it includes the tokens generated before.
            sampling: ``max_tokens`` counts new tokens only.

        Raises:
            BadRequestError: no engine of the pool can serve the request, for example because it is too long.
        """

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop requests; their :meth:`generate` returns the tokens generated so far, with finish ``abort``.

        Idempotent. Names of unknown and ended requests are ignored. An abort may overtake its request, so the agent
        repeats it until the request has ended. During a pause an abort takes effect at :meth:`resume` at the latest.
        """

    async def join(self, update: PrepareWeights, seconds: float) -> None:
        """Leave the previous weight group and join that of ``update``, in all workers.

        The sender is rank 0 and listens at ``update.address``; workers are ranks 1 to ``update.world_size`` - 1.
        Requests continue meanwhile. After a failure no group is joined, and the engine is
        otherwise unchanged.

        Args:
            update: transport, group, address, port, world_size and bucket_bytes describe the group.
            seconds: time limit; the call returns or raises within it.

        Raises:
            EngineError: the group did not form in time.
        """

    async def pause(self, in_flight: str) -> None:
        """Stop generating. Idempotent. When it returns, no worker computes with the weights.

        Args:
            in_flight: treatment of requests in flight. ``keep``: they continue at :meth:`resume`, and the KV cache
                of their tokens is computed again with the new weights. ``keepStaleCache``: they continue with the
                current KV cache. ``abort``: they return with finish ``abort``. ``wait``: they are completed first. Only
                modes of :attr:`Adapter.in_flight` occur. New requests never use cached prefixes of old weights.
        """

    async def receive(self, update: PrepareWeights, seconds: float) -> str:
        """Receive ``update.parameters`` in the group that was joined, load them, serve them as ``update.version``, and
        return their digest (``WeightReceiver.digest``).

        The engine is paused and stays so. All workers load their part of all tensors. Before the engine uses them,
        every worker compares the bytes that it received with the sender's digest and with those of the other workers
        (``WeightReceiver.receive`` raises): no worker commits what another one refuses. Tokens sampled
        later carry the new version in their spans. Names are those of the Hugging Face checkpoint; tied parameters are
        sent once.

        Args:
            update: ``parameters`` in wire order (:mod:`rljob.protocol.weights`), ``lineage`` and ``version``.
            seconds: time limit; the call returns or raises within it.

        Raises:
            EngineError: the weights were not committed. They may be a mixture, or corrupted; the group is left. The
                engine accepts another :meth:`join` and :meth:`receive`, or reports that it is dead.
        """

    async def resume(self) -> None:
        """Continue generating. Idempotent; no effect on an engine that is not paused."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1, under the current weights.

        After every update the agent compares them with the trainer's values for the same tokens: a difference means
        that the received weights are not in use, or that engine and trainer compute differently.
        """


class Adapter(Protocol):
    """One engine, set up for one pool by an :class:`AdapterFactory`. The preflight reads :attr:`in_flight` and calls
    :meth:`problems`."""

    @property
    def in_flight(self) -> Collection[str]:
        """Values of `weightSync.inFlight` that the engine supports; see :meth:`EngineClient.pause`."""

    def problems(self) -> Iterator[str]:
        """Yield ``field: sentence`` for each reason why a server cannot start here, such as a missing package or an
        unknown argument. Fields are those of the pool (``args``). May take seconds; starts and writes nothing."""

    def launch(self, port: int, key: str) -> Launch:
        """Return how to start a server.

        The server listens on 127.0.0.1 at ``port`` only and rejects requests without ``key`` on all routes
        (:mod:`rljob.rollout.auth_middleware` is an ASGI middleware for that): routes that change weights must not be
        open to other processes of the machine. It serves ``model`` with the settings of the pool: ``dtype``,
        ``max_concurrency`` requests at a time and some more, for :meth:`EngineClient.score` and one of one token,
        ``max_model_length``, ``parallelism``, ``kv_cache_bytes`` (of each worker) and ``args``. It exits with code 2 if
        it refuses its settings; :meth:`problems` reports sizes that the adapter does not support.
        """

    def connect(self, port: int, key: str) -> EngineClient:
        """Return a client of that server. Does not wait for the server to be ready."""

    def find_error(self, lines: Iterable[str]) -> str:
        """Return the error that ended a server, from the lines of its log; empty if no line names an error.
        :func:`rljob.rollout.exit_diagnosis.first_error` finds Python's and argparse's errors behind a log prefix."""


@runtime_checkable
class ServingAdapter(Protocol):
    """An :class:`Adapter` whose engine can also serve a frozen pool: a model that gets no weights, asked by rewards
    through an API compatible with OpenAI's (:mod:`rljob.rollout.frozen_engine`). Of the client, only ``healthy`` and
    ``close`` are used then."""

    def launch_frozen(self, port: int, key: str) -> Launch:
        """Return how to start a server that serves ``model`` under the name of the pool.

        As :meth:`Adapter.launch`, but with a tokenizer and without routes for weights. It serves the paths of
        :data:`rljob.rollout.frozen_engine.PATHS` that the model can answer.
        """


class AdapterFactory(Protocol):
    """The callable that `rollouts[].engine` names: usually the adapter's class."""

    def __call__(self, pool: Rollout, model: Path) -> Adapter:
        """Return the adapter of a pool. Cheap; starts nothing.

        Args:
            pool: the entry of `rollouts`, resolved.
            model: directory of the model that servers start with; it may not exist yet in the preflight.
        """


def unpack_ints(packed: bytes) -> list[int]:
    """Return the numbers of packed int32."""
    numbers = array("i")
    numbers.frombytes(packed)
    return numbers.tolist()
