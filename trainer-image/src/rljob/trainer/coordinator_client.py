"""Rank 0's connection to the coordinator: a thread with the link, a queue of commands, and results to repeat.

Training never waits for the connection. After a reconnect the last results are sent again; the coordinator accepts
repetitions. The coordinator also sends its commands again, so queued commands are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import structs

from rljob.protocol.coordinator_link import CoordinatorLink, RefusedError
from rljob.protocol.heartbeat import beating
from rljob.protocol.shared_messages import Reject
from rljob.protocol.trainer_protocol import (
    CancelSend,
    Checkpoint,
    CheckpointCopied,
    Checkpointed,
    RefuseCheckpoint,
    RefusedCheckpoint,
    RegisterTrainer,
    SendWeights,
    StepDone,
    Stop,
    ToTrainer,
    Train,
    TrainerBlocked,
    TrainerFailed,
    TrainerRegistered,
    WeightGroupReady,
    WeightsSent,
)

log = logging.getLogger(__name__)

Command: TypeAlias = TrainerRegistered | Train | SendWeights | Checkpoint | RefuseCheckpoint | Stop | Reject
Result: TypeAlias = (
    StepDone | CheckpointCopied | Checkpointed | WeightGroupReady | WeightsSent | TrainerBlocked | TrainerFailed
)

CLOSE_SECONDS = 5.0


class Results:
    """Results that the coordinator may not have received yet: the last of each kind.

    Weight messages are not kept: when a connection breaks, the coordinator drops updates in progress and starts them
    again.
    """

    def __init__(self) -> None:
        self._kept: dict[type, StepDone | Checkpointed | TrainerFailed] = {}

    def add(self, result: Result) -> None:
        """Keep ``result`` instead of the previous one of its kind."""
        if isinstance(result, StepDone | Checkpointed | TrainerFailed):
            self._kept[type(result)] = result

    def of(self, incarnation: int) -> list[Result]:
        """Return the kept results of ``incarnation``, the step first, because checkpoints depend on it."""
        ordered = [self._kept[kind] for kind in (StepDone, Checkpointed, TrainerFailed) if kind in self._kept]
        return [result for result in ordered if result.incarnation == incarnation]


class CoordinatorClient:
    """Rank 0's client of the coordinator.

    Args:
        url: its address.
        token: the trainer's token.
        registration: of this process, with the step of the weights that it loaded.
        cancel: handles CancelSend at once, in the connection's thread, because a command may be in progress.
    """

    def __init__(
        self, url: str, token: str, registration: RegisterTrainer, cancel: Callable[[CancelSend], None]
    ) -> None:
        self._link = CoordinatorLink(url, "trainer", token, ToTrainer, self._register)
        self._registration = registration
        self._cancel = cancel
        self._results = Results()
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        """Connect, and reconnect until :meth:`close`."""
        self._thread.start()

    def close(self) -> None:
        """Disconnect; wait at most CLOSE_SECONDS."""
        if self._thread.is_alive():
            self._ready.wait()
            assert self._events is not None and self._task is not None
            with contextlib.suppress(RuntimeError):  # the thread has already ended
                self._events.call_soon_threadsafe(self._task.cancel)
            self._thread.join(CLOSE_SECONDS)

    def next(self, timeout_seconds: float | None = None) -> Command | None:
        """Return the next command, waiting for it; None when ``timeout_seconds`` pass first.

        Raises:
            RuntimeError: another thread failed: that of the connection, or see :meth:`fail`.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            while not self._commands:
                if self._error is not None:
                    raise RuntimeError("a thread of the trainer failed") from self._error
                if not self._changed.wait(None if deadline is None else deadline - time.monotonic()):
                    return None
            return self._commands.popleft()

    def wait_obsolete(self, seconds: float | None = None, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait up to ``seconds``, or until ``unless`` is true (see :meth:`wake`); return True as soon as the current
        command is obsolete: the coordinator stops the trainer, or the connection is new and the coordinator sends all
        commands again."""

        def obsolete() -> bool:
            superseded = any(isinstance(command, Stop | Reject | TrainerRegistered) for command in self._commands)
            return superseded or self._error is not None

        with self._changed:
            self._changed.wait_for(lambda: obsolete() or unless(), seconds)
            return obsolete()

    def wake(self) -> None:
        """Let :meth:`wait_obsolete` evaluate its condition again. Thread-safe."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let :meth:`next` raise, because another thread failed. Thread-safe."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def post(self, result: Result) -> None:
        """Send a result, now or after the next reconnect. Thread-safe."""
        with self._changed:
            self._results.add(result)
            if isinstance(result, StepDone):
                self._registration.step = max(self._registration.step, result.step + 1)
        if self._events is not None:
            self._events.call_soon_threadsafe(self._link.send, result)

    def refuse(self, checkpoints: list[RefusedCheckpoint]) -> None:
        """Register again, now or after the next reconnect, and report more refused checkpoints. Thread-safe."""
        with self._changed:
            known = {refused.step for refused in self._registration.refused}
            added = [refused for refused in checkpoints if refused.step not in known]
            self._registration = structs.replace(self._registration, refused=[*self._registration.refused, *added])
            registration = self._registration
        assert self._events is not None, "the answer to the first registration precedes this call"
        self._events.call_soon_threadsafe(self._link.send, registration)

    def _register(self) -> list[Any]:
        with self._changed:
            self._commands = deque(command for command in self._commands if isinstance(command, Stop | Reject))
            return [self._registration, *self._results.of(self._registration.incarnation)]

    def _receive(self, command: Command) -> None:
        with self._changed:
            if isinstance(command, TrainerRegistered):
                self._registration.incarnation = command.incarnation
            self._commands.append(command)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            asyncio.run(self._exchange_messages())
        except asyncio.CancelledError:
            pass  # close()
        except RefusedError as error:
            self._receive(Reject(str(error), fatal=True))
        except Exception as error:  # any error ends the thread: next() raises it in the main thread
            log.exception("the connection to the coordinator failed")
            self.fail(error)

    async def _exchange_messages(self) -> None:
        self._events, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._ready.set()
        with beating():
            async for message in self._link.messages():
                if isinstance(message, CancelSend):
                    self._cancel(message)
                else:
                    self._receive(message)
