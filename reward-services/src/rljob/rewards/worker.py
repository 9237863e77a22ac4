"""A worker process: scores the samples that it receives over its socket, one at a time.

Workers are forked from the service after the reward is loaded: a fork takes milliseconds, an import seconds. Between
both is the worker's parent (:mod:`rljob.rewards.worker_parent`). The worker sets the reward up and sends READY, or one
line that says why it cannot, and exits. The service sends lines of JSON, each a list of ScoreItems. The worker answers
each item with one line, its Score, in order and as soon as it has it, so the service always knows which sample is being
scored.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rljob.protocol.parent_death import set_parent_death_signal
from rljob.protocol.score_messages import MAX_ERROR, MAX_SCORE_BYTES, Score, ScoreItem
from rljob.rewards.evaluate import described, error_score
from rljob.rewards.worker_parent import fork_from_parent

READY = b"ready\n"

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(list[ScoreItem])
_encoder = msgspec.json.Encoder()


class Evaluator(Protocol):
    """Scores samples in a worker; see :class:`rljob.rewards.evaluate.RewardEvaluator`."""

    batched: bool
    deterministic: bool

    @property
    def together(self) -> bool:
        """Whether samples of a chunk are scored at the same time."""

    def set_up(self) -> None:
        """Prepare the worker; it may raise any exception."""

    def score_all(self, items: Sequence[ScoreItem], send: Callable[[Score], None], seconds: float | None) -> None:
        """Call ``send`` with the score of each item, in order; ``seconds``: limit for one sample."""


def fork_worker(
    evaluator: Evaluator, seconds: float | None = None, memory_bytes: int | None = None
) -> tuple[int, socket.socket]:
    """Start a worker; return the process id of its parent, which ends as the worker does, and the service's side of
    the worker's socket.

    ``seconds``: limit for one sample, which an async scorer observes by itself. ``memory_bytes``: limit of what the
    worker may allocate beyond the memory of the service; an allocation beyond raises MemoryError.

    Call it on the main thread: the kernel kills the worker when the thread that forked it ends.
    """
    service = os.getpid()
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:  # no process left
        ours.close()
        theirs.close()
        raise
    if pid:
        theirs.close()
        return pid, ours
    try:
        _leave_service(service, theirs.fileno())
        fork_from_parent()
        if memory_bytes is not None:
            _limit_memory(memory_bytes)
        send = _sender(theirs)
        failure = _set_up(evaluator)
        send(READY if failure is None else failure)
        if failure is None:
            serve(theirs, send, evaluator, seconds)
            os._exit(0)
    except BaseException:  # no exception may reach the copy of the service's event loop
        log.exception("a reward worker failed")
    finally:
        os._exit(1)


def _set_up(evaluator: Evaluator) -> bytes | None:
    """Prepare the worker. If this fails, log the exception and return a line that names it."""
    try:
        evaluator.set_up()
    except (Exception, SystemExit) as error:  # of user code
        log.exception("the set-up of a reward worker failed")
        text = " ".join(described(error).split())[:MAX_ERROR]
        return f"set_up raised {text}\n".encode(errors="backslashreplace")
    return None


def _sender(connection: socket.socket) -> Callable[[bytes], None]:
    """Return the function that sends the service a line. A process that the reward has forked, and that returned from
    the reward, too, ends in it."""
    own = os.getpid()

    def send(line: bytes) -> None:
        if os.getpid() != own:
            os._exit(1)
        connection.sendall(line)

    return send


def serve(
    connection: socket.socket, send: Callable[[bytes], None], evaluator: Evaluator, seconds: float | None
) -> None:
    """Score samples until the other side closes the socket."""
    with connection.makefile("rb") as lines:
        for line in lines:
            evaluator.score_all(_decoder.decode(line), lambda score: send(_encoded(score) + b"\n"), seconds)


def _encoded(score: Score) -> bytes:
    """Return a score as JSON. A score that is too long, or whose metrics cannot be encoded, becomes an error."""
    try:
        line = _encoder.encode(score)
    except ValueError as error:  # lone surrogates
        return _encoder.encode(error_score(score.sample, f"the reward returned a metric that cannot be sent: {error}"))
    if len(line) <= MAX_SCORE_BYTES:
        return line
    bounds = f"{len(line) / 1024:,.0f} KiB of metrics; at most {MAX_SCORE_BYTES // 1024} KiB"
    return _encoder.encode(error_score(score.sample, f"the reward returned {bounds}"))


def _limit_memory(additional: int) -> None:
    """Limit the address space to its present size and ``additional`` bytes."""
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    limit, hard = present + additional, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _leave_service(service: int, keep: int) -> None:
    """Drop inherited signal handlers, sockets of other workers and connections of clients.

    The worker's parent leads a session, by which the processes that a worker starts are found. Closes all files except
    standard input, output, error and ``keep``: a copy in the worker would keep a file open that the service has closed.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != service:  # the service exited before the line above
        os._exit(1)
    os.setsid()  # Ctrl-C does not reach them, either; the service ends them
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
