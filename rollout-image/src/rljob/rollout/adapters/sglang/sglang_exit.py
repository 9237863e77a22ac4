"""Ends SGLang's server with exit code 1 when one of its processes fails, and reports which signal killed one.

SGLang itself would kill its own process, which the agent cannot distinguish from a server that something else killed.
It looks for killed processes once a second; a scheduler that waits for a killed one fails earlier.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import wait
from typing import Any

from sglang.srt.utils import kill_process_tree

from rljob.protocol.exit_codes import FAILURE

GRACE_SECONDS = 0.5
"""Time in which a process ends whose connections are closed."""


def end_server(number: int | None = None, frame: Any = None) -> None:
    """Kill the other processes of the server and exit; SGLang's handler of SIGQUIT while it starts."""
    end_with(FAILURE)


def end_with(code: int) -> None:
    """Kill the other processes of the server and exit.

    Nothing is logged from here on: SGLang would report the processes that are killed here as the reason of the end.
    Python itself would wait for them.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        silence()
        kill_process_tree(os.getpid(), include_parent=False)
    finally:
        os._exit(code)


def silence() -> None:
    """Discard what this process writes to stdout and stderr from here on."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def end_at_failures(arguments: Any, handlers: Any) -> None:
    """Let SGLang call :func:`end_server` when one of its processes fails.

    Args:
        arguments: SGLang's ServerArgs, for its start.
        handlers: SGLang's SignalHandler, for the time after it.
    """

    def end(self: Any, number: int | None = None, frame: Any = None) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        try:
            report_kills(self.tokenizer_manager._subprocess_watchdog)
        finally:
            end_server()

    arguments.custom_sigquit_handler = end_server
    handlers.running_phase_sigquit_handler = end


def report_kills(watchdog: Any) -> None:
    """Write a line to stderr for each process that a signal killed, in the words of ``watchdog``, SGLang's
    SubprocessWatchdog; None: there is none yet."""
    if watchdog is None:
        return
    wait([process.sentinel for process in watchdog._processes], GRACE_SECONDS)
    for process, name in zip(watchdog._processes, watchdog._names, strict=True):
        if (process.exitcode or 0) < 0:
            sys.stderr.write(f"Subprocess {name} (pid={process.pid}) crashed with exit code {process.exitcode}\n")
    sys.stderr.flush()
