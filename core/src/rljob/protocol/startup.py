"""Functions that a process calls before it loads its libraries: SIGTERM, --check, lazy imports, HOST:PORT.

Imports nothing outside the standard library.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob.protocol.exit_codes import CONFIGURATION_ERROR

FIRST_PROCESS = 1
MAX_PORT = 65_535
CHECK_REPORT = "RLJOB_CHECK_REPORT"
"""Variable of a process with --check: file for the problems. Logs and output of a user's modules remain on stderr."""


def end_on_sigterm() -> None:
    """Let SIGTERM end this process while it loads, even as PID 1 of a container.

    PID 1 ignores signals without a handler, so the pod would use its whole grace period to end.

    No state is lost, because a loading process has none. Call it before all imports; a later handler replaces it.
    """
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def report_problems(find: Callable[[], Iterable[str]]) -> int:
    """Write the problems that ``find`` yields, one per line; return the exit code.

    The problems are written to the file that RLJOB_CHECK_REPORT names, or to stderr if it is not set. The file exists
    only after a completed check. A ValueError or OSError that ``find`` raises is a problem too.
    """
    problems: list[str] = []
    try:
        problems.extend(find())
    except (ValueError, OSError) as error:
        problems.append(str(error))
    lines = [f"{problem}\n" for problem in problems]
    report = os.environ.get(CHECK_REPORT)
    if report:
        Path(report).write_text("".join(lines))
    else:
        sys.stderr.writelines(lines)
    return CONFIGURATION_ERROR if problems else 0


class _LazyModule(ModuleType):
    """Placeholder of a module until one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def lazy_imports(*names: str) -> Iterator[None]:
    """Replace these top-level modules by placeholders for modules that are imported inside the context. A placeholder
    loads its module on first use.

    importlib's LazyLoader is not sufficient: it loads a module as soon as a submodule is imported.
    """
    lazy = {name: _LazyModule(name) for name in names if name not in sys.modules}
    sys.modules.update(lazy)
    try:
        yield
    finally:
        for name, module in lazy.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def has_port(address: str) -> bool:
    """Return whether HOST:PORT has a valid port; 0 means any free one."""
    port = host_and_port(address)[1]
    return port.isascii() and port.isdecimal() and len(port) <= len(str(MAX_PORT)) and int(port) <= MAX_PORT


def host_and_port(address: str) -> tuple[str, str]:
    """Return host and port of HOST:PORT. The brackets of [::1]:8080 are removed.

    Returns:
        The host; empty means all addresses, of IPv4 and IPv6. The port, or empty text.
    """
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.count(":") > 1:  # an IPv6 address alone
        return address, ""
    host, _, port = address.partition(":")
    return host, port
