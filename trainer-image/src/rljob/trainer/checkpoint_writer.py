"""Writes checkpoints in a thread of each rank while training continues: one at a time.

Training stops only while each rank copies its part of the weights and moments to the memory of the host. The thread
owns the copy until the files are durable. The threads of all ranks write one checkpoint together. If a process dies
before, the directory has a temporary name, which the next process removes, and the previous checkpoint is the newest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rljob.protocol.checkpoint_copies import CopyError
from rljob.trainer.errors import NoRoomError, SupersededError
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0  # between attempts to write to a full disk


class CheckpointWriter:
    """The thread that writes, if there is one. All ranks start the same writes in the same order.

    Args:
        world: the ranks, with a control group that only the threads use.
        report: sends the reason why a write waits for room on the disk; empty when it no longer waits.
        fail: receives an error that must end the process.
        idle: called when :attr:`step` has become None.
    """

    def __init__(
        self,
        world: World,
        report: Callable[[str], None],
        fail: Callable[[BaseException], None],
        idle: Callable[[], None],
    ) -> None:
        self._world = world
        self._report = report
        self._fail = fail
        self._idle = idle
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._step: int | None = None

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that is being written; None if there is none."""
        return self._step

    def start(self, step: int, write: Callable[[], None], done: Callable[[], None]) -> None:
        """Call ``write``, again while it is blocked, and then ``done``, in the thread. On rank 0 none may run yet.

        Args:
            step: of the checkpoint.
            write: raises NoRoomError while the disk is full, CopyError while S3 cannot be used, and SupersededError if
                the checkpoint is obsolete, each on all ranks.
            done: called once the files are written.
        """
        self.join()  # on other ranks the thread may still learn that rank 0 has finished
        assert self._step is None, "the caller waits for the previous checkpoint"
        self._step = step
        self._thread = threading.Thread(target=self._run, args=(write, done), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the write; all ranks give it up if it is blocked."""
        self._closed.set()
        self.join()

    def join(self) -> None:
        """Wait for the write."""
        if self._thread is not None:
            self._thread.join()

    def _any_closes(self, seconds: float) -> bool:
        """Return whether any rank calls :meth:`close`, after up to ``seconds``; all ranks get the same answer."""
        if self._world.rank == 0:
            self._closed.wait(seconds)
        return any(self._world.gather(self._closed.is_set()))

    def _run(self, write: Callable[[], None], done: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            if retry_while_blocked(write, self._any_closes, self._report):
                log.info("the checkpoint of step %s was written in %.1f s", self._step, time.monotonic() - started)
                done()
        except SupersededError as error:
            log.warning("the checkpoint of step %s is not written: %s", self._step, error)
        except Exception as error:  # any error ends the process: the main thread raises it
            log.exception("writing the checkpoint of step %s failed", self._step)
            self._fail(error)
            return
        self._step = None
        self._idle()


def retry_while_blocked(
    attempt: Callable[[], None], wait: Callable[[float], bool], report: Callable[[str], None]
) -> bool:
    """Call ``attempt`` until it succeeds; return False if ``wait`` ends it before.

    Args:
        attempt: raises NoRoomError while the disk is full, CopyError while S3 cannot be used.
        wait: waits for these seconds; returns True at once if no further attempt is needed.
        report: receives each reason, and an empty one once an attempt has succeeded.
    """
    pause = FIRST_RETRY_SECONDS
    while True:
        try:
            attempt()
            break
        except (NoRoomError, CopyError) as error:
            log.error("%s; the next attempt is in %.0f s", error, pause)
            report(str(error))
        if wait(pause):
            return False
        pause = min(2 * pause, LAST_RETRY_SECONDS)
    if pause > FIRST_RETRY_SECONDS:
        report("")
    return True
