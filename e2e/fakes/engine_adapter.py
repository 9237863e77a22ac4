"""An engine that a manifest of a test names as module:attribute. Its server is never started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rljob.api.roles import Rollout
from rljob.rollout.adapters.base import EngineClient, Launch


class SleepingEngine:
    """An adapter whose server sleeps."""

    in_flight = ("keep",)

    def __init__(self, pool: Rollout, model: Path) -> None:
        self._pool = pool

    def problems(self) -> Iterator[str]:
        """Yield one problem for each of the pool's arguments."""
        yield from (f"args[{i}]: {arg!r} is unknown; remove it" for i, arg in enumerate(self._pool.args))

    def launch(self, port: int, key: str) -> Launch:
        """Return a command without a server."""
        return Launch(["sleep", "60"], {})

    def connect(self, port: int, key: str) -> EngineClient:
        """Raise: there is no server."""
        raise NotImplementedError

    def find_error(self, lines: Iterable[str]) -> str:
        """Return the last line."""
        return [*lines, ""][-1]
