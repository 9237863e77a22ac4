"""The proxy between this process and an API server, chosen as kubectl chooses it."""

from __future__ import annotations

import ipaddress
import urllib.request
from urllib.parse import urlsplit

from rljob.kube.access import Access


def proxy_of(access: Access) -> str:
    """Return the URL of the proxy: `proxy-url` of the kubeconfig, else that of the environment unless NO_PROXY has the
    host. Empty: no proxy. A loopback address has no proxy of the environment."""
    address = urlsplit(access.server)
    host = address.hostname or ""
    if access.proxy or _is_loopback(host) or _is_excluded(host):
        found = access.proxy
    else:
        found = urllib.request.getproxies().get(address.scheme, "")
    return found if not found or "://" in found else f"http://{found}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_excluded(host: str) -> bool:
    """Return whether NO_PROXY contains a host, or a network with the host's address."""
    if urllib.request.proxy_bypass(host):
        return True
    for entry in urllib.request.getproxies().get("no", "").split(","):
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:  # the host or the entry is a name
            continue
    return False
