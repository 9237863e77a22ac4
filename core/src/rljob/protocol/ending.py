"""The end of a part by a signal, before it has handlers of its own."""

from __future__ import annotations

import os
import signal

FIRST_PROCESS = 1


def end_on_sigterm() -> None:
    """Have SIGTERM end this process while it loads, also as the first process of a container, which a signal without
    a handler leaves alone: a pod would be waited for until its grace is over.

    Nothing is lost: a part that loads has nothing yet. Called first of all; a handler set later takes its place.
    """
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
