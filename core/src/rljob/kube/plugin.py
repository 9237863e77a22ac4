"""Exec plugins: programs that print credentials, as in kubeconfigs of cloud providers (`users[].user.exec`).

Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
RUN_SECONDS = 600.0
"""Timeout of the program; a user may have to log in with a browser."""
EXPIRY_MARGIN_SECONDS = 10.0
"""A credential is replaced this long before it expires, because a request takes time and clocks differ."""


@dataclass(frozen=True)
class Credential:
    """Output of a program: a token, a certificate with its key, or both."""

    token: str = field(default="", repr=False)
    certificate: str = ""
    key: str = field(default="", repr=False)
    expires: float = float("inf")
    """Unix time."""


class Plugin:
    """A program that prints credentials, and its last output.

    Args:
        config: ``users[].user.exec``.
        cluster: ``clusters[].cluster``, passed to the program if provideClusterInfo is set.
        directory: directory of the kubeconfig; a command with a slash is relative to it.

    Raises:
        ValueError: the configuration cannot be used.
    """

    def __init__(self, config: Mapping[str, Any], cluster: Mapping[str, Any], directory: Path) -> None:
        self._config, self._cluster = config, cluster
        self._version = str(config.get("apiVersion"))
        if self._version not in VERSIONS:
            raise ValueError(f"exec.apiVersion: {self._version} is not supported; use {' or '.join(VERSIONS)}")
        command = str(config.get("command") or "")
        if not command:
            raise ValueError("exec.command: missing; name the program that prints credentials")
        self._command = str(directory / command) if os.sep in command else command
        self._cached: Credential | None = None
        self._presented = ""

    def credential(self) -> Credential:
        """Return the credential. Run the program if there is no credential or it expires.

        Raises:
            ValueError: the program prints no credential. The message names the program and the installHint.
        """
        if self._cached is None or time.time() > self._cached.expires - EXPIRY_MARGIN_SECONDS:
            self._cached = self._run()
        return self._cached

    def forget(self) -> None:
        """Drop the credential after the server rejected it. The next call runs the program again."""
        self._cached = None

    def present_certificate(self, tls: ssl.SSLContext) -> None:
        """Load the certificate into ``tls`` if the program prints one."""
        credential = self.credential()
        if credential.certificate and credential.certificate != self._presented:
            load_certificate(tls, f"{credential.certificate}\n{credential.key}".encode())
            self._presented = credential.certificate

    def _run(self) -> Credential:
        program = shutil.which(self._command)
        if program is None:
            hint = str(self._config.get("installHint") or "install it").strip()
            raise ValueError(f"exec.command: there is no program {self._command} on the PATH; {hint}")
        interactive = self._config.get("interactiveMode", "IfAvailable") != "Never" and sys.stdin.isatty()
        try:
            done = subprocess.run(
                [program, *map(str, self._config.get("args") or [])],
                env={**os.environ, **self._variables(interactive)},
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # stderr goes to the user, because it explains how to log in
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"exec: {self._command} printed no credentials within {RUN_SECONDS:.0f} s") from None
        except OSError as error:
            raise ValueError(f"exec: {self._command} cannot be run: {error.strerror}") from None
        if done.returncode != 0:
            raise ValueError(f"exec: {self._command} ended with exit code {done.returncode}; log in again")
        return self._read(done.stdout)

    def _variables(self, interactive: bool) -> dict[str, str]:
        spec: dict[str, Any] = {"interactive": interactive}
        if self._config.get("provideClusterInfo"):
            known = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
            spec["cluster"] = {name: self._cluster[name] for name in known if name in self._cluster}
        info = {"apiVersion": self._version, "kind": "ExecCredential", "spec": spec}
        given = {str(entry["name"]): str(entry.get("value", "")) for entry in self._config.get("env") or []}
        return {**given, "KUBERNETES_EXEC_INFO": json.dumps(info)}

    def _read(self, answer: bytes) -> Credential:
        try:
            status = json.loads(answer)["status"]
            until = status.get("expirationTimestamp")
            found = Credential(
                status.get("token") or "",
                status.get("clientCertificateData") or "",
                status.get("clientKeyData") or "",
                datetime.fromisoformat(until).timestamp() if until else float("inf"),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"exec: the output of {self._command} is not an ExecCredential of {self._version}"
            ) from None
        if not (found.token or (found.certificate and found.key)):
            raise ValueError(f"exec: {self._command} prints neither a token nor a certificate with its key")
        return found


def load_certificate(tls: ssl.SSLContext, chain: bytes) -> None:
    """Load a client certificate into ``tls``. ``chain``: certificate and key (PEM).

    Raises:
        OSError: certificate or key cannot be used.
    """
    with tempfile.NamedTemporaryFile() as file:  # the ssl module reads certificates from files only
        file.write(chain)
        file.flush()
        tls.load_cert_chain(file.name)
