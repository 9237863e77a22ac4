"""Reads kubeconfigs as kubectl does: several files are merged, and the first value wins.

Source: https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rljob.kube.access import Access, in_cluster
from rljob.kube.plugin import Plugin, load_certificate

UNSUPPORTED = ("auth-provider", "username", "as-groups", "as-user-extra", "as-uid")
NO_KUBECONFIG = "there is no kubeconfig: {} does not exist; copy the cluster's there, or name it in KUBECONFIG"
MAX_NAMES = 8
"""Maximum number of names in a message."""


@dataclass(frozen=True)
class Entry:
    """A cluster, user or context. Paths in ``data`` are relative to ``directory``."""

    data: dict[str, Any]
    directory: Path


@dataclass
class Kubeconfig:
    """The merged files."""

    files: list[Path] = field(default_factory=list)
    current: str = ""
    """Name of the current context."""
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """clusters, users, contexts → name → entry."""

    def add(self, path: Path) -> None:
        """Merge a file. Entries of earlier files win.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            data = yaml.safe_load(path.read_text()) or {}
            found = list(_entries(data, path.parent))
            self.current = self.current or str(data.get("current-context") or "")
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            cause = str(getattr(error, "strerror", None) or error).splitlines()[0].lower()
            raise ValueError(f"{path}: cannot be read as a kubeconfig: {cause}") from None
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}: is not a kubeconfig; correct it, or name another file in KUBECONFIG") from None
        self.files.append(path)
        for section, name, entry in found:
            self.entries.setdefault(section, {}).setdefault(name, entry)

    @property
    def source(self) -> str:
        """The files, for messages."""
        return ":".join(map(str, self.files))

    def access(self, context: str = "") -> Access:
        """Return the access of a context; empty: the current context.

        Raises:
            ValueError: the context, its cluster or its user is missing or cannot be used.
        """
        context = context or self.current
        contexts = self.entries.get("contexts", {})
        if not context:
            raise ValueError(f"{self.source}: current-context is missing; name a context: {_listed(contexts)}")
        if context not in contexts:
            raise ValueError(f"{self.source}: there is no context {context!r}; there are {_listed(contexts)}")
        chosen = contexts[context].data
        cluster, user = self._named("clusters", chosen, context), self._named("users", chosen, context)
        for unsupported in UNSUPPORTED:
            if unsupported in user.data:
                raise ValueError(
                    f"{self.source}: users with {unsupported} are not supported; use a certificate, a token or exec"
                )
        try:
            return _access(cluster, user, context, chosen)
        except (OSError, binascii.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{self.source}: a certificate or key in it cannot be used: {error}") from None
        except ValueError as error:
            raise ValueError(f"{self.source}: user {chosen['user']}: {error}") from None

    def _named(self, section: str, context: dict[str, Any], name: str) -> Entry:
        """Return the cluster or user that a context names. ``name``: name of the context."""
        wanted = context.get(section.removesuffix("s"))
        found = self.entries.get(section, {}).get(str(wanted))
        if found is None or (section == "clusters" and not found.data.get("server")):
            raise ValueError(
                f"{self.source}: {section}[{wanted}] is missing, which context {name} names; correct the kubeconfig"
            )
        return found


def _entries(data: dict[str, Any], directory: Path) -> Iterator[tuple[str, str, Entry]]:
    """Yield section, name and entry."""
    for section in ("clusters", "users", "contexts"):
        for entry in data.get(section) or []:
            yield section, str(entry["name"]), Entry(dict(entry.get(section.removesuffix("s")) or {}), directory)


def _listed(names: dict[str, Entry]) -> str:
    found = sorted(names)
    return ", ".join(found[:MAX_NAMES]) + (", …" if len(found) > MAX_NAMES else "") or "none"


def _access(cluster: Entry, user: Entry, context: str, chosen: dict[str, Any]) -> Access:
    server = str(cluster.data["server"]).rstrip("/")
    program = user.data.get("exec")
    return Access(
        server,
        _tls(cluster, user) if server.startswith("https:") else None,
        user.directory / user.data["tokenFile"] if "tokenFile" in user.data else None,
        str(user.data.get("token") or ""),
        Plugin(program, cluster.data, user.directory) if program else None,
        impersonated=str(user.data.get("as") or ""),
        server_name=str(cluster.data.get("tls-server-name") or ""),
        proxy=str(cluster.data.get("proxy-url") or ""),
        context=context,
        user=str(chosen.get("user")),
        namespace=str(chosen.get("namespace") or ""),
    )


def _tls(cluster: Entry, user: Entry) -> ssl.SSLContext:
    authority = _bytes(cluster, "certificate-authority")
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.data.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
    if certificate and key:
        load_certificate(context, certificate + b"\n" + key)
    return context


def _bytes(entry: Entry, name: str) -> bytes:
    """Return the value of NAME-data, or the content of the file in NAME; empty if neither is set."""
    if entry.data.get(f"{name}-data"):
        return base64.b64decode(entry.data[f"{name}-data"])
    return (entry.directory / entry.data[name]).read_bytes() if entry.data.get(name) else b""


def read(paths: Sequence[Path]) -> Kubeconfig:
    """Return the merged files of ``paths``; missing files are skipped.

    Raises:
        ValueError: all files are missing, or a file cannot be read.
    """
    config = Kubeconfig()
    for path in paths:
        if path.exists():
            config.add(path)
    if not config.files:
        raise ValueError(NO_KUBECONFIG.format(" and ".join(map(str, paths))))
    return config


def from_kubeconfig(path: Path, context: str = "") -> Access:
    """Return the access of a context in one file; empty: the current context.

    Raises:
        ValueError: the file cannot be used.
    """
    return read([path]).access(context)


def default_paths() -> list[Path]:
    """Return the paths that kubectl reads: those in KUBECONFIG, else ~/.kube/config."""
    named = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return named or [Path.home() / ".kube" / "config"]


def configured() -> bool:
    """Return whether there is a kubeconfig, or a service account of this pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(path.exists() for path in default_paths())


def default_access(context: str = "") -> Access:
    """Return the access that kubectl uses: from a kubeconfig, or this pod's service account if there is none.

    Raises:
        ValueError: neither a kubeconfig nor a service account exists, or the context is missing or cannot be used.
    """
    paths = default_paths()
    pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if pod and not context and not any(path.exists() for path in paths):
        return in_cluster()
    return read(paths).access(context)
