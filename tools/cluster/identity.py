"""Identities of a test cluster: static tokens, kubeconfigs, and the key that signs service account tokens."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kwok": ("kwok", "system:masters"),
}
"""Name of a static token → (user, group)."""


def tokens(path: Path, users: Mapping[str, tuple[str, str]] = USERS) -> dict[str, str]:
    """Write the API server's token file and return each user's token."""
    created = {name: secrets.token_hex(16) for name in users}
    lines = [f'{created[name]},{user},{name},"{group}"' for name, (user, group) in users.items()]
    path.write_text("\n".join(lines) + "\n")
    return created


def signing_key(path: Path) -> None:
    """Write a new private key on the curve P-256 (RFC 5915; the optional public key is left out)."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    number = (secrets.randbelow(order - 1) + 1).to_bytes(32, "big")
    curve = bytes.fromhex("a00a06082a8648ce3d030107")
    der = bytes.fromhex("30310201010420") + number + curve
    text = base64.encodebytes(der).decode()
    path.write_text(f"-----BEGIN EC PRIVATE KEY-----\n{text}-----END EC PRIVATE KEY-----\n")
    path.chmod(0o600)


def kubeconfig(
    path: Path, url: str, authority: Path, token: str, namespace: str = "default", name: str = "test"
) -> Path:
    """Write a self-contained kubeconfig (JSON is YAML) with one context ``name``; return its path."""
    cluster = {"server": url, "certificate-authority-data": base64.b64encode(authority.read_bytes()).decode()}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"token": token}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))
    return path
