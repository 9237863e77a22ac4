"""Address and credentials of an API server; from within a pod those of its service account."""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

from rljob.kube.plugin import Plugin

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""A token file is read again after so long: the kubelet replaces it before it expires."""


@dataclass
class Access:
    """Address and credentials of an API server."""

    server: str
    """Such as https://10.0.0.1:443; may end with a path."""
    tls: ssl.SSLContext | None = None
    """None for plain HTTP."""
    token_file: Path | None = None
    token: str = field(default="", repr=False)
    plugin: Plugin | None = None
    """A program that gives the token, or a certificate."""
    impersonated: str = ""
    """Whose rights are used instead of one's own."""
    server_name: str = ""
    """Whom the server's certificate names, where that is not the host of ``server``."""
    proxy: str = ""
    """Such as http://proxy:3128; empty: as the environment says."""
    context: str = ""
    """Of the kubeconfig; empty in a pod."""
    user: str = ""
    """Of the kubeconfig."""
    namespace: str = ""
    """What is meant when none is named."""
    _read_at: float | None = field(default=None, repr=False)

    def headers(self) -> dict[str, str]:
        """Return the headers that say who we are; a certificate says it without any.

        Raises:
            OSError: the token cannot be read.
            ValueError: the plugin gives no credentials.
        """
        now = time.monotonic()
        if self.token_file is not None and (self._read_at is None or now - self._read_at > TOKEN_SECONDS):
            self.token = self.token_file.read_text().strip()
            self._read_at = now
        token = self.plugin.credential().token if self.plugin is not None else self.token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return headers | {"Impersonate-User": self.impersonated} if self.impersonated else headers

    def security(self) -> ssl.SSLContext | None:
        """Return what connections are made with: ``tls``, with the plugin's certificate where it gives one."""
        if self.tls is not None and self.plugin is not None:
            self.plugin.present_certificate(self.tls)
        return self.tls


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of this pod's service account.

    Raises:
        ValueError: this is no pod, or it has no service account.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ValueError("KUBERNETES_SERVICE_HOST is not set: outside a cluster give --kubeconfig or set KUBECONFIG")
    token = directory / "token"
    if not token.exists():
        raise ValueError(f"{token}: there is no token; the pod needs a service account")
    tls = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    namespace = directory / "namespace"
    return Access(
        f"https://{f'[{host}]' if ':' in host else host}:{port}",
        tls,
        token,
        user="the pod's service account",
        namespace=namespace.read_text().strip() if namespace.exists() else "",
    )
