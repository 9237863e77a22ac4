"""What a process needs while it starts, before its libraries are loaded: SIGTERM, --check, lazy imports, HOST:PORT.

Imports the standard library only.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

FIRST_PROCESS = 1


def end_on_sigterm() -> None:
    """Have SIGTERM end this process while it loads, also as the first process of a container, which a signal without
    a handler leaves alone: a pod would be waited for until its grace is over.

    Nothing is lost: a part that loads has nothing yet. Called first of all; a handler set later takes its place.
    """
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def report_problems(find: Callable[[], Iterable[str]]) -> int:
    """Print the problems that ``find`` gives, a line each, on stderr; return the exit code: 2 when there are any.

    A ValueError or OSError that it raises is a problem too.
    """
    problems: list[str] = []
    try:
        problems.extend(find())
    except (ValueError, OSError) as error:
        problems.append(str(error))
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 2 if problems else 0


class _LazyModule(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def lazy_imports(*names: str) -> Iterator[None]:
    """Let what is imported within get these top-level modules only when it uses something of them.

    Importlib's own LazyLoader does not do: an ``import`` of what it loads has it load at once.
    """
    lazy = {name: _LazyModule(name) for name in names if name not in sys.modules}
    sys.modules.update(lazy)
    try:
        yield
    finally:
        for name, module in lazy.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def host_and_port(address: str) -> tuple[str, str]:
    """Return host and port of HOST:PORT. The brackets of [::1]:8080 are taken off.

    Returns:
        The host, empty where none is said: all addresses, of IPv4 and IPv6. The port, empty where none is said.
    """
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.count(":") > 1:  # an IPv6 address alone
        return address, ""
    host, _, port = address.partition(":")
    return host, port
