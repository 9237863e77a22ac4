"""Settings of this machine for build steps that use the network, mounted at /run/host: trusted certificates, package
mirrors, proxy. A mount leaves no trace in an image; build arguments would."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

INSIDE = "/run/host"
CACHE = "uv-cache"
"""Name, in the directory, of the mount point of uv's cache."""
CERTIFICATES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))
PIP = (Path("~/.config/pip/pip.conf"), Path("/etc/pip.conf"))
UV = (Path("~/.config/uv/uv.toml"), Path("/etc/uv/uv.toml"))
LENT = (
    *(f"{name}_proxy" for name in ("http", "https", "no", "all")),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"),
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_HTTP_TIMEOUT", "UV_INSECURE_HOST"),
)
"""Environment variables for build steps; those of proxies also in capitals."""


def lend(directory: Path, environment: Mapping[str, str], apt_sources: str = "") -> None:
    """Write the settings of this machine into ``directory``.

    Args:
        directory: an empty one.
        environment: of this process.
        apt_sources: lines of a sources.list that replaces the image's own; empty: the image's own is used.
    """
    (directory / CACHE).mkdir()
    lent = {name: environment[name] for name in _names() if name in environment}
    certificates = environment.get("SSL_CERT_FILE")
    if _copy([Path(certificates)] if certificates else CERTIFICATES, directory / "certificates.pem"):
        lent |= dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT"), f"{INSIDE}/certificates.pem")
    if _copy(PIP, directory / "pip.conf"):
        lent["PIP_CONFIG_FILE"] = f"{INSIDE}/pip.conf"
    if _copy(UV, directory / "uv.toml"):
        lent["UV_CONFIG_FILE"] = f"{INSIDE}/uv.toml"
    settings = f'Acquire::https::CAInfo "{INSIDE}/certificates.pem";\n' if "SSL_CERT_FILE" in lent else ""
    if apt_sources:
        (directory / "sources.list").write_text(apt_sources)
        settings += f'Dir::Etc::sourcelist "{INSIDE}/sources.list";\nDir::Etc::sourceparts "-";\n'
    (directory / "apt.conf").write_text(settings)
    lent["APT_CONFIG"] = f"{INSIDE}/apt.conf"
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(lent.items())]
    lines.append(f"[ ! -e {INSIDE}/{CACHE}/CACHEDIR.TAG ] || export UV_CACHE_DIR={INSIDE}/{CACHE}\n")
    (directory / "environment").write_text("".join(lines))


def uv_cache(environment: Mapping[str, str]) -> Path:
    """Return the directory of uv's cache on this machine; create it if it is missing."""
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(environment.get("UV_CACHE_DIR") or Path(home, "uv"))
    cache.mkdir(parents=True, exist_ok=True)
    tag = cache / "CACHEDIR.TAG"
    if not tag.exists():
        tag.write_text("Signature: 8a477f597d28d172789f06886806bc55")  # https://bford.info/cachedir/
    return cache


def _names() -> list[str]:
    return [*LENT, *(name.upper() for name in LENT if name.endswith("_proxy"))]


def _copy(candidates: tuple[Path, ...] | list[Path], target: Path) -> bool:
    """Copy the first existing file."""
    for path in candidates:
        if path.expanduser().is_file():
            shutil.copyfile(path.expanduser(), target)
            return True
    return False
