"""Families cut, silence and loss: TCP connections that break, fall silent, or lose packets.

The soak has a network namespace of its own with nothing but a loopback interface, so rules and cuts affect no other
program. `ss -K` closes sockets (the kernel's SOCK_DESTROY); nftables resets, drops and loses packets.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from typing import TYPE_CHECKING

from e2e.faults.proxy import Moment
from e2e.soak.fault import Family, Fault, FaultError

if TYPE_CHECKING:
    from e2e.soak.soak_run import SoakRun

TABLE = "rljob-soak"
RESET_SECONDS = 5.0
SILENT_SECONDS = 20.0
LOSS_SECONDS = 20.0
LOSS_PERCENT = 5

CUTS = (
    Fault("cut", "cut", "agent", moment=Moment("agent", "PrepareWeights", "after")),
    Fault("cut", "cut", "trainer", moment=Moment("trainer", "Train", "after")),
    Fault("cut", "cut", "coordinator", moment=Moment("agent", "Completions", "before")),
    Fault("cut", "close", "coordinator", expected=8.0),
    Fault("cut", "close", "engine", expected=20.0),
    Fault("cut", "close", "all", expected=40.0),
    Fault("cut", "reset", "coordinator", RESET_SECONDS, expected=12.0),
    Fault("cut", "reset", "reward", RESET_SECONDS, expected=12.0),
    Fault("cut", "reset", "engine", RESET_SECONDS, expected=25.0),
)
SILENCES = tuple(
    Fault("silence", "silence", victim, SILENT_SECONDS, moment, expected=SILENT_SECONDS + 12.0)
    for victim, moment in [
        ("coordinator", None),
        ("reward", None),
        ("engine", None),
        ("coordinator", Moment("trainer", "SendWeights", "after")),
        ("reward", Moment("reward", "Score", "before")),
        ("all", None),
    ]
)
LOSSES = (Fault("loss", f"lose {LOSS_PERCENT} % at", "all", LOSS_SECONDS, expected=LOSS_SECONDS + 6.0),)


def missing() -> str:
    """Return what this kernel or system lacks for these faults; empty if nothing."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
                _close({port})
                client.settimeout(1.0)
                if client.recv(1) == b"":
                    return "ss -K closes no connection (CONFIG_INET_DIAG_DESTROY)"
    except ConnectionError:
        pass  # it was closed
    except (OSError, FaultError) as error:
        return f"ss -K does not work: {error}"
    try:
        for rule in (_silence({1}), _reset({1}), _lose()):
            _set_rules(rule)
            _remove_rules()
    except FaultError as error:
        return str(error)
    return ""


def cut(run: SoakRun, fault: Fault) -> None:
    """Break connections: through the proxy, by closing the sockets, or with resets for some seconds."""
    if fault.kind == "cut":
        run.proxy.cut(fault.victim)
    elif fault.kind == "close":
        _close(run.rljob.ports(fault))
    else:
        _set_rules(_reset(run.rljob.ports(fault)))


def silence(run: SoakRun, fault: Fault) -> None:
    """Drop all packets from and to the ports of the victim."""
    _set_rules(_silence(run.rljob.ports(fault)))


def lose(run: SoakRun, fault: Fault) -> None:
    """Drop random packets."""
    _set_rules(_lose())


async def restore(run: SoakRun, fault: Fault) -> None:
    """Remove the rules after the time of the fault."""
    if fault.seconds:
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            _remove_rules()


def _close(ports: set[int]) -> None:
    """Close the established connections of some ports; of all ports if the set is empty."""
    matches = " or ".join(f"sport = :{port} or dport = :{port}" for port in sorted(ports))
    _command("ss", "-K", "-t", "state", "established", *([f"( {matches} )"] if matches else []))


def _silence(ports: set[int]) -> str:
    return " ; ".join(f"tcp {side} {_set(ports)} drop" for side in ("dport", "sport"))


def _reset(ports: set[int]) -> str:
    return f"tcp dport {_set(ports)} reject with tcp reset"


def _lose() -> str:
    return f"meta l4proto tcp numgen random mod 100 < {LOSS_PERCENT} drop"


def _set(ports: set[int]) -> str:
    return "{ " + ", ".join(map(str, sorted(ports))) + " }" if ports else "0-65535"


def _set_rules(rules: str) -> None:
    chain = "type filter hook input priority 0 ; policy accept"
    _command("nft", f"table inet {TABLE} {{ chain input {{ {chain} ; {rules} ; }} ; }}")


def _remove_rules() -> None:
    _command("nft", f"delete table inet {TABLE}")


def _command(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise FaultError(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        raise FaultError(f"{' '.join(command)} failed: {done.stderr.strip()}")


CUT = Family(CUTS, 3, cut, restore)
SILENCE = Family(SILENCES, 2, silence, restore)
LOSS = Family(LOSSES, 1, lose, restore)
