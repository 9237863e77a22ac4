"""Escapes the tracebacks of exceptions that nothing catches, for programs that run a user's code in a terminal."""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType

from rljob.api.text_escape import escape_block


def escape_tracebacks() -> None:
    """Escape control characters in the tracebacks that Python itself prints: of this process, of its threads, and of
    methods whose exceptions Python ignores, such as ``__del__``."""
    sys.excepthook = _print_of_process
    threading.excepthook = _print_of_thread
    sys.unraisablehook = _print_ignored


def _print_of_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _print("", kind, error, trace)


def _print_of_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_type is not SystemExit:  # it ends a thread without a message
        name = given.thread.name if given.thread else "of C"
        _print(f"Exception in thread {name}:\n", given.exc_type, given.exc_value, given.exc_traceback)


def _print_ignored(given: sys.UnraisableHookArgs) -> None:
    name = getattr(given.object, "__qualname__", type(given.object).__name__)
    what = given.err_msg or "Exception ignored in"
    _print(f"{what} {name}:\n", given.exc_type, given.exc_value, given.exc_traceback)


def _print(title: str, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    sys.stderr.write(escape_block(title + "".join(traceback.format_exception(kind, error, trace))))
