"""What an inference engine must be able to do for the agent, and how it says that it cannot.

The agent knows engines through these types only; one module beside this one per engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rljob.protocol.messages import PrepareWeights, SamplingParams, VersionSpan


class EngineError(Exception):
    """The engine did not do what was asked."""


class BadRequestError(EngineError):
    """The engine refuses a request for what it is: no engine will take it."""


class EngineGoneError(EngineError):
    """The engine did not answer, or answered that something broke inside it."""


@dataclass(frozen=True)
class Launch:
    """How to start a server. ``environment`` is added to the agent's own; a value of None removes the variable."""

    command: list[str]
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Output:
    """What a request produced, in the form of a Completion."""

    token_ids: bytes  # int32
    logprobs: bytes  # float32
    spans: list[VersionSpan]
    finish: str  # stop | length | abort


class EngineClient(Protocol):
    """A running server. Every method raises EngineGoneError when it does not answer."""

    async def close(self) -> None:
        """Close all connections."""

    async def healthy(self) -> bool:
        """Return whether the server is up and its engine alive."""

    async def responsive(self) -> bool:
        """Return once the engine itself, not only its server, has answered; False when it is dead."""

    async def generate(self, request: str, token_ids: bytes, sampling: SamplingParams) -> Output:
        """Generate a completion of ``token_ids`` (int32), called ``request``.

        Raises:
            BadRequestError: the request cannot be served by any engine.
        """

    async def abort(self, requests: Sequence[str]) -> None:
        """Stop these; their ``generate`` returns what there is."""

    async def join(self, update: PrepareWeights, seconds: float) -> None:
        """Join the update's weight group, leaving any other."""

    async def pause(self, in_flight: str) -> None:
        """Stop generating; ``in_flight`` as in PrepareWeights."""

    async def receive(self, update: PrepareWeights, seconds: float) -> None:
        """Receive and load the update's weights and commit them as its version. The engine is paused."""

    async def resume(self) -> None:
        """Go on generating."""

    async def digest(self) -> str:
        """Return the digest of the weights received last, the same for all workers."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""


class Adapter(Protocol):
    """One kind of engine, set up for a pool."""

    def problems(self) -> Iterator[str]:
        """Yield ``field: sentence`` for what would keep a server from starting here; fields are those of the pool."""

    def launch(self, port: int, key: str) -> Launch:
        """Return how to start a server on a port of loopback that only holders of ``key`` may use."""

    def connect(self, port: int, key: str) -> EngineClient:
        """Return a client of that server."""
