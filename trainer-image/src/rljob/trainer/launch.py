"""Starts the trainer's processes of this node, one per rank, and exits with their result:

    python -m rljob.trainer.launch PROCESSES

It replaces torchrun, without torchrun's rendezvous, restarts and second import of torch. Exit codes of ranks are kept:
2 means that a restart does not help.

Each node runs the launcher once. RLJOB_NODES is the number of nodes, RLJOB_NODE_RANK the number of this node,
RLJOB_MASTER the address of the first node (HOST or HOST:PORT), RLJOB_HOST the address of this node. The process that
started the launchers ends all of them when one ends.

The trainer's heartbeat comes from rank 0, which holds the link to the coordinator. The other ranks wait for rank 0
without a time limit and write no heartbeat while they wait. On nodes without rank 0 the launcher writes the heartbeat
for its ranks, except while a rank is stopped or waits for a disk or device that does not answer. If a rank hangs in
another way, the ranks that wait for it notice it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob.protocol.environment import MASTER, NODE_RANK, NODES
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.free_port import free_port
from rljob.protocol.health_probe import HEARTBEAT
from rljob.protocol.startup import host_and_port

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0  # time for other ranks that fail for the same reason to log it
KILL_SECONDS = 5.0
BEAT_SECONDS = 0.3
MASTER_PORT = 29500  # default of torch
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Nodes:
    """The nodes of the trainer, seen from one of them."""

    count: int = 1
    rank: int = 0
    master: str = ""
    """Address of the rendezvous: HOST or HOST:PORT of the first node; a free port of loopback if there is one node."""
    host: str = ""
    """Address of this node."""

    def address(self) -> tuple[str, int]:
        """Return the address of the rendezvous for the ranks of this node. The first node does not use its own name,
        which the cluster's DNS may not have yet."""
        if self.count == 1:
            return "127.0.0.1", free_port()
        host, port = host_and_port(self.master)
        return host if self.rank else "localhost", int(port or MASTER_PORT)

    def variables(self) -> dict[str, str]:
        """Return network variables for the ranks. gloo uses the address that the host name resolves to, which is the
        loopback address on some machines, so it gets the interface of this node's address."""
        if self.count == 1 or GLOO_INTERFACE in os.environ:
            return {}
        interface = interface_of(self.host)
        return {GLOO_INTERFACE: interface} if interface else {}


def nodes_of(environment: Mapping[str, str]) -> Nodes:
    """Return the nodes that the environment describes.

    Raises:
        ValueError: the variables contradict each other.
    """
    count, rank = int(environment.get(NODES) or 1), int(environment.get(NODE_RANK) or 0)
    master = environment.get(MASTER, "")
    if not 0 <= rank < count:
        raise ValueError(f"{NODE_RANK}: {rank} is not one of {count} nodes; set it to 0 … {count - 1}")
    if count > 1 and not master:
        raise ValueError(f"{MASTER} is not set, and there are {count} nodes; set it to the address of the first")
    return Nodes(count, rank, master, environment.get("RLJOB_HOST", ""))


def interface_of(address: str) -> str:
    """Return the name of the network interface that has ``address``; empty if no interface has it, and for IPv6.

    With the name of an interface gloo may use its link-local IPv6 address, which other nodes cannot reach; without it
    gloo uses the address of the host's name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(query, GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def launch(command: list[str], processes: int, nodes: Nodes = Nodes()) -> int:
    """Run ``command`` as each rank until all have ended or one has failed; return the exit code."""
    signals: list[int] = []  # no threading.Event: its set() hangs if the signal comes while its wait() holds the lock
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.append(received))
    ranks = _start(command, processes, nodes)
    codes = _codes(ranks)
    beat = _beats(ranks, nodes)
    while None in codes and not any(codes) and not signals:
        time.sleep(POLL_SECONDS)
        codes = _codes(ranks)
        next(beat)
    if not signals:
        _wait(ranks, REPORT_SECONDS)
    codes = _codes(ranks)
    for rank, code in enumerate(codes):
        if code:
            log.error("rank %d %s", rank, f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")
    _end(ranks)
    if signals:
        return 128 + signal.SIGTERM  # not 0: the training is not complete
    if CONFIGURATION_ERROR in codes:
        return CONFIGURATION_ERROR
    return 1 if any(codes) else 0


def _start(command: list[str], processes: int, nodes: Nodes) -> list[subprocess.Popen[bytes]]:
    host, port = nodes.address()
    common = {
        "WORLD_SIZE": nodes.count * processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        **nodes.variables(),
    }
    ranks = []
    for i in range(processes):
        own = common | {"RANK": nodes.rank * processes + i, "LOCAL_RANK": i}
        ranks.append(subprocess.Popen(command, env=os.environ | {name: str(value) for name, value in own.items()}))
    return ranks


def _beats(ranks: list[subprocess.Popen[bytes]], nodes: Nodes) -> Iterator[None]:
    """Touch the heartbeat file every BEAT_SECONDS on nodes without rank 0."""
    path, last = os.environ.get(HEARTBEAT), 0.0
    while True:
        yield
        if path and nodes.rank and time.monotonic() - last >= BEAT_SECONDS and not any(map(_stopped, ranks)):
            last = time.monotonic()
            with contextlib.suppress(OSError):  # the reader of the heartbeat reports a missing one
                Path(path).touch()


def _stopped(rank: subprocess.Popen[bytes]) -> bool:
    """Return whether a rank is stopped or in uninterruptible sleep (D). A short D is usual: the next poll writes the
    heartbeat again."""
    try:
        state = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the rank has just ended
        return False
    return state in ("T", "t", "D")


def _codes(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit code of each rank, None while it runs."""
    return [rank.poll() for rank in ranks]


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Return when all ranks have ended, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while None in _codes(ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    _wait(ranks, KILL_SECONDS)
    for rank in ranks:
        rank.kill()
        rank.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s launcher: %(message)s")
    try:
        found = nodes_of(os.environ)
    except ValueError as error:
        log.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
    sys.exit(launch([sys.executable, "-m", "rljob.trainer.main"], int(sys.argv[1]), found))
