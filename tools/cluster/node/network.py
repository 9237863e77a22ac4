"""The cluster's network: one link to the machine, which gives access to the cluster only.

The machine's own settings are not changed: it forwards no packets, so the cluster and its pods cannot reach other
machines.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import time
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.commands import SERVICES
from tools.cluster.node.system import CommandError, run

PODS = "10.244.0.0/16"
BRIDGE = "pods0"
_UPLINK = "eth0"
_CANDIDATES = ("172.31.255.252/30", "192.168.255.252/30", "10.255.255.252/30")
_LINK_SECONDS = 20.0


@dataclass(frozen=True)
class Link:
    """The link between machine and cluster: interface of the machine, addresses, prefix length of their network."""

    name: str
    machine: str
    cluster: str
    prefix: int


def free(name: str) -> Link:
    """Return a link with addresses that the machine has no other route to."""
    routes = [route["dst"] for route in json.loads(run("ip", "-json", "route")) if route["dst"] != "default"]
    taken = [ipaddress.ip_network(route, strict=False) for route in routes]
    for candidate in map(ipaddress.ip_network, _CANDIDATES):
        if not any(candidate.overlaps(network) for network in taken):
            machine, cluster = candidate.hosts()
            return Link(name, str(machine), str(cluster), candidate.prefixlen)
    raise CommandError(f"the machine has routes to all of {', '.join(_CANDIDATES)}: free one of them for the cluster")


def connect(link: Link, pid: int) -> None:
    """Join the machine and the network namespace of the process ``pid``."""
    run("ip", "link", "add", link.name, "type", "veth", "peer", "name", _UPLINK, "netns", str(pid))
    run("ip", "address", "add", f"{link.machine}/{link.prefix}", "dev", link.name)
    run("ip", "link", "set", link.name, "up")


def disconnect(name: str) -> None:
    """Remove the link if it exists. (The kernel removes it after the cluster's end, but with a delay.)"""
    with contextlib.suppress(CommandError):
        run("ip", "link", "delete", name)


def set_up(address: str, prefix: int) -> None:
    """Wait for the link and configure the node's network, within its namespace."""
    deadline = time.monotonic() + _LINK_SECONDS
    while not _exists(_UPLINK):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the link to the machine was not created within {_LINK_SECONDS:g} s")
        time.sleep(0.02)
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{address}/{prefix}", "dev", _UPLINK)
    run("ip", "link", "set", _UPLINK, "up")
    # The node needs a route to Services: iptables translates their addresses after routing.
    run("ip", "route", "add", SERVICES, "dev", _UPLINK, "src", address)
    for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables", "net/ipv4/conf/all/route_localnet"):
        Path("/proc/sys", name).write_text("1")
    # The kubelet accepts every client that reaches it; pods must not.
    run("iptables", "-A", "INPUT", "-i", BRIDGE, "-p", "tcp", "--dport", "10250", "-j", "REJECT")


def _exists(name: str) -> bool:
    return any(found["ifname"] == name for found in json.loads(run("ip", "-json", "link")))
