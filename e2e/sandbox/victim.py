"""A process of the same user as the sandbox: it has secrets, a file and sockets, and says what has happened to them.

Each line on standard input is answered with one line of JSON: the state, which no attack may change. Standard library
only: it runs as other users, without the packages of .venv.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Usage: victim.py DIRECTORY SECRET"""
    directory, secret = Path(sys.argv[1]), sys.argv[2]
    file = directory / "secret"
    file.write_text(secret)
    file.chmod(0o600)
    names: dict[str, Any] = {"path": str(directory / "socket"), "abstract": f"\0rljob-victim-{os.getpid()}"}
    servers = [
        listening(socket.AF_INET, ("127.0.0.1", 0)),
        *(listening(socket.AF_UNIX, name) for name in names.values()),
    ]
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(directory / "datagrams"))
    datagrams.setblocking(False)
    signals: list[int] = []
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}:
        signal.signal(number, lambda number, _: signals.append(number))
    about = {"pid": os.getpid(), "file": str(file), "port": servers[0].getsockname()[1]} | names
    about["datagrams"] = str(directory / "datagrams")
    say(about)
    for _ in sys.stdin:
        say(state(file, servers, datagrams, signals))


def listening(family: int, address: Any) -> socket.socket:
    """Return a server at an address."""
    server = socket.socket(family)
    server.bind(address)
    server.listen()
    server.setblocking(False)
    return server


def state(file: Path, servers: list[socket.socket], datagrams: socket.socket, signals: list[int]) -> dict[str, Any]:
    """Return all that an attack could change."""
    heard = 0
    for server in servers:
        with contextlib.suppress(BlockingIOError):
            server.accept()[0].close()
            heard += 1
    with contextlib.suppress(BlockingIOError):
        datagrams.recv(1)
        heard += 1
    found = file.stat()
    return {
        "heard": heard,
        "signals": signals,
        "file": [file.read_text(), found.st_mode, found.st_uid, found.st_mtime_ns, found.st_nlink],
        "attributes": os.listxattr(file),
        "directory": sorted(path.name for path in file.parent.iterdir()),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(number) for number in range(16)],
    }


def say(answer: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
