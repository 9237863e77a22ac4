"""One episode: calls the environment with its time limit and turns its results into observations."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rljob.environments import metrics
from rljob.environments.sdk_types import EpisodeError
from rljob.protocol.episode_messages import Observation, problem_of

log = logging.getLogger(__name__)

THREADS = 64
"""Calls of environments that are not async, at a time."""
MAX_ABANDONED = 32
"""Threads that still run after their time limit. Python cannot end a thread, so with more the process ends."""
MEAN = "mean"


class Calls:
    """Calls environments in the event loop or in threads, each with the same time limit in seconds."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self._threads = asyncio.Semaphore(THREADS)
        self._abandoned = 0

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function or an async function.

        Raises:
            EpisodeError: it raised an exception, or took longer than the limit.
        """
        if not inspect.iscoroutinefunction(function):
            return await self._in_thread(function, *arguments)
        try:
            async with asyncio.timeout(self.seconds) as limit:
                return await function(*arguments)
        except (Exception, SystemExit) as error:  # code of a user may raise anything; only its episode fails
            if limit.expired():
                raise self._too_slow(function) from None
            raise self.failure(function, error) from error

    def call_here(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function that takes microseconds.

        Raises:
            EpisodeError: it raised an exception.
        """
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # as above
            raise self.failure(function, error) from error

    def failure(self, function: Callable[..., Any], error: BaseException) -> EpisodeError:
        """Return the error of an episode whose environment raised ``error``."""
        metrics.FAILURES.inc()
        return EpisodeError(f"environment {self.name}: {function.__name__} raised {type(error).__name__}: {error}")

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        late = threading.Event()

        def finish(value: Any, error: BaseException | None) -> None:
            if late.is_set():
                self._abandoned -= 1
            elif not result.done():
                if error is None:
                    result.set_result(value)
                else:
                    result.set_exception(error)

        def run() -> None:
            value, raised = None, None
            try:
                value = function(*arguments)
            except BaseException as error:  # noqa: BLE001 it is raised in the event loop
                raised = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, value, raised)

        async with self._threads:
            threading.Thread(target=run, daemon=True, name=f"{self.name}-{function.__name__}").start()
            try:
                async with asyncio.timeout(self.seconds) as limit:
                    return await result
            except asyncio.CancelledError:  # the session was closed
                late.set()
                self._abandon()
                raise
            except (Exception, SystemExit) as error:  # as above
                if not limit.expired():
                    raise self.failure(function, error) from error
                late.set()
                self._abandon()
                raise self._too_slow(function) from None

    def _too_slow(self, function: Callable[..., Any]) -> EpisodeError:
        metrics.TIMEOUTS.inc()
        return EpisodeError(
            f"environment {self.name}: {function.__name__} took more than {self.seconds:g} s and was cancelled",
            hung=True,
        )

    def _abandon(self) -> None:
        self._abandoned += 1
        log.warning("environment %s: a thread runs after its time limit (%d now)", self.name, self._abandoned)
        if self._abandoned > MAX_ABANDONED:
            log.error("environment %s: %d threads hang; the process ends", self.name, self._abandoned)
            os._exit(1)  # threads cannot be ended; the supervisor starts the service again


class Episode:
    """One object of the environment, from its reset to its end.

    Args:
        factory: makes the environment.
        calls: calls it.
    """

    __slots__ = ("_calls", "_environment", "_factory", "_here", "_steps")

    def __init__(self, factory: Callable[[], Any], calls: Calls) -> None:
        self._factory = factory
        self._calls = calls
        self._environment: Any = None
        self._here = False
        self._steps = 0

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Make the environment and return its first observation.

        Raises:
            EpisodeError: the environment failed.
        """
        self._environment = self._calls.call_here(self._factory)
        self._here = bool(getattr(self._environment, "in_event_loop", False))
        result = await self._call(self._environment.reset, seed, row)
        try:
            text, info = result
        except (TypeError, ValueError):
            raise EpisodeError(f"environment {self._calls.name}: reset must return (observation, info)") from None
        return self._checked(text, 0.0, False, False, info)

    def step_here(self, action: str) -> Observation | None:
        """Return the result of a step that is made in the event loop; None: use :meth:`step`.

        Raises:
            EpisodeError: the environment failed.
        """
        return self._observation(self._calls.call_here(self._environment.step, action)) if self._here else None

    async def step(self, action: str) -> Observation:
        """Make one step.

        Raises:
            EpisodeError: the environment failed.
        """
        return self._observation(await self._call(self._environment.step, action))

    @property
    def closable(self) -> bool:
        """Whether the environment has a ``close`` that was not called."""
        return hasattr(self._environment, "close")

    def abandon(self) -> None:
        """Forget the environment: a call of it hangs, so another call could do harm."""
        self._environment = None

    async def close(self) -> None:
        """Call ``close`` of a closable environment; an error is logged."""
        environment, self._environment = self._environment, None
        try:
            await self._call(environment.close)
        except EpisodeError as error:
            log.warning("%s", error)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._here and not inspect.iscoroutinefunction(function):
            return self._calls.call_here(function, *arguments)
        return await self._calls.call(function, *arguments)

    def _observation(self, result: Any) -> Observation:
        self._steps += 1
        try:
            text, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            raise EpisodeError(
                f"environment {self._calls.name}: step must return (observation, reward, terminated, truncated, info)"
            ) from None
        return self._checked(text, reward, terminated, truncated, info)

    def _checked(self, text: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Observation:
        name = self._calls.name
        if not isinstance(text, str):
            raise EpisodeError(f"environment {name}: an observation is of type {type(text).__name__}, not text")
        try:
            modes = info.get("metrics_agg_mode", {}) if info else {}
            values = {str(key): float(value) for key, value in info["metrics"].items()} if "metrics" in info else {}
            found = Observation(
                step=self._steps,
                observation=text,
                reward=float(reward),
                terminated=bool(terminated),
                truncated=bool(truncated),
                metrics={key: value for key, value in values.items() if modes.get(key) != MEAN},
                means={key: value for key, value in values.items() if modes.get(key) == MEAN},
            )
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EpisodeError(f"environment {name}: a reward or metric is not a number ({error})") from None
        if problem := problem_of(found):
            metrics.FAILURES.inc()
            raise EpisodeError(f"environment {name} returned {problem}")
        return found
