"""Addresses as variables and settings write them: HOST:PORT, of either family."""

from __future__ import annotations


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
