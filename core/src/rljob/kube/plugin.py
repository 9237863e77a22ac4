"""Credentials that a program gives, as kubeconfigs of cloud providers have them (`users[].user.exec`).

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
"""Longest time for the program: somebody may log in with a browser meanwhile."""
EARLY_SECONDS = 10.0
"""Before its end a credential is not used any more: the request takes time, and clocks differ."""


@dataclass(frozen=True)
class Credential:
    """What a program gave: a token, a certificate with its key, or both."""

    token: str = field(default="", repr=False)
    certificate: str = ""
    key: str = field(default="", repr=False)
    expires: float = float("inf")
    """Unix time."""


class Plugin:
    """A program that gives credentials, and what it gave last.

    Args:
        config: ``users[].user.exec``.
        cluster: ``clusters[].cluster``, which the program is told where it asks for it.
        directory: of the kubeconfig; the command may be relative to it.

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
            raise ValueError("exec.command: it is missing; name the program that gives credentials")
        self._command = str(directory / command) if os.sep in command else command
        self._known: Credential | None = None
        self._presented = ""

    def credential(self) -> Credential:
        """Return the credential, a new one when that of before has expired.

        Raises:
            ValueError: the program gives none; says which program, and what its kubeconfig says about installing it.
        """
        if self._known is None or time.time() > self._known.expires - EARLY_SECONDS:
            self._known = self._run()
        return self._known

    def forget(self) -> None:
        """Have the program run again: what it gave is not accepted."""
        self._known = None

    def present_certificate(self, tls: ssl.SSLContext) -> None:
        """Have connections made with ``tls`` present the certificate, if the program gives one."""
        given = self.credential()
        if given.certificate and given.certificate != self._presented:
            load_certificate(tls, f"{given.certificate}\n{given.key}".encode())
            self._presented = given.certificate

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
                stdout=subprocess.PIPE,  # stderr is the person's: how to log in is said there
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"exec: {self._command} gave no credentials within {RUN_SECONDS:.0f} s") from None
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
            raise ValueError(f"exec: what {self._command} prints is no ExecCredential of {self._version}") from None
        if not (found.token or (found.certificate and found.key)):
            raise ValueError(f"exec: {self._command} gives neither a token nor a certificate with its key")
        return found


def load_certificate(tls: ssl.SSLContext, chain: bytes) -> None:
    """Have connections made with ``tls`` present a certificate, with its key in ``chain`` too (PEM).

    Raises:
        OSError: it cannot be used.
    """
    with tempfile.NamedTemporaryFile() as file:  # the ssl module takes certificates from files only
        file.write(chain)
        file.flush()
        tls.load_cert_chain(file.name)
