"""Address and credentials of an API server; inside a pod those of its service account."""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

from rljob.kube.plugin import Plugin

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""A token file is read again after this time, because the kubelet replaces the token before it expires."""


@dataclass
class Access:
    """Address and credentials of an API server."""

    server: str
    """URL, for example https://10.0.0.1:443; it may end with a path."""
    tls: ssl.SSLContext | None = None
    """None for plain HTTP."""
    token_file: Path | None = None
    token: str = field(default="", repr=False)
    plugin: Plugin | None = None
    """A program that prints the token or a certificate."""
    impersonated: str = ""
    """User for the header Impersonate-User."""
    server_name: str = ""
    """Name in the server's certificate, if it differs from the host of ``server``."""
    proxy: str = ""
    """URL, for example http://proxy:3128; empty: the proxy of the environment."""
    context: str = ""
    """Context of the kubeconfig; empty in a pod."""
    user: str = ""
    """User of the kubeconfig, for messages."""
    namespace: str = ""
    """Default namespace."""
    authority_file: Path | None = None
    """Certificates of the authority, if ``tls`` was made from a file that may be replaced."""
    _read_at: float | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """Name of the cluster for messages."""
        return f"context {self.context}" if self.context else f"the cluster at {self.server}"

    def headers(self) -> dict[str, str]:
        """Return the headers with the credentials; empty if a certificate is used.

        Raises:
            OSError: the token cannot be read.
            ValueError: the plugin returns no credentials.
        """
        now = time.monotonic()
        if self.token_file is not None and (self._read_at is None or now - self._read_at > TOKEN_SECONDS):
            self.token = self.token_file.read_text().strip()
            self._read_at = now
        token = self.plugin.credential().token if self.plugin is not None else self.token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return headers | {"Impersonate-User": self.impersonated} if self.impersonated else headers

    def security(self) -> ssl.SSLContext | None:
        """Return the TLS context for new connections: ``tls``, with the plugin's certificate if there is one."""
        if self.tls is not None and self.plugin is not None:
            self.plugin.present_certificate(self.tls)
        return self.tls

    def forget_credentials(self) -> None:
        """Read the token file, or run the plugin, again before the next request. Call it after a rejected request."""
        self._read_at = None
        if self.plugin is not None:
            self.plugin.forget()

    def reload_authority(self) -> bool:
        """Read ``authority_file`` again, after a rejected server certificate. Return whether the file has changed."""
        if self.authority_file is None:
            return False
        before = self.tls.get_ca_certs(binary_form=True) if self.tls is not None else []
        try:
            found = ssl.create_default_context(cafile=str(self.authority_file))
        except OSError:
            return False
        if found.get_ca_certs(binary_form=True) == before:
            return False
        self.tls = found
        return True


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of this pod's service account.

    Raises:
        ValueError: the process is not in a pod, or the pod has no service account.
    """
    server = in_cluster_server()
    if server is None:
        raise ValueError("KUBERNETES_SERVICE_HOST is not set: outside a cluster give --kubeconfig or set KUBECONFIG")
    if not (directory / "token").exists():
        raise ValueError(f"{directory / 'token'}: there is no token; the pod needs a service account")
    return service_account(server, directory)


def in_cluster_server() -> str | None:
    """Return the address of the API server from the environment that the kubelet sets; None outside a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else None


def service_account(server: str, directory: Path) -> Access:
    """Return the access with `token`, `ca.crt` and, if there is one, `namespace` of a directory.

    Raises:
        OSError: the certificates cannot be read.
    """
    authority, namespace = directory / "ca.crt", directory / "namespace"
    return Access(
        server,
        ssl.create_default_context(cafile=str(authority)),
        directory / "token",
        user="the pod's service account",
        namespace=namespace.read_text().strip() if namespace.exists() else "",
        authority_file=authority,
    )
