"""Ends SGLang's server with exit code 1 when one of its processes fails.

SGLang itself would kill its own process, which the agent cannot distinguish from a server that something else killed.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.utils import kill_process_tree

FAILED = 1


def end_server(number: int | None = None, frame: Any = None) -> None:
    """Kill the other processes of the server and exit; SGLang's handler of SIGQUIT while it starts."""
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(FAILED)


def end_at_failures(arguments: Any, handlers: Any) -> None:
    """Let SGLang call :func:`end_server` when one of its processes fails.

    Args:
        arguments: SGLang's ServerArgs, for its start.
        handlers: SGLang's SignalHandler, for the time after it.
    """
    arguments.custom_sigquit_handler = end_server
    handlers.running_phase_sigquit_handler = lambda self, number=None, frame=None: end_server()
