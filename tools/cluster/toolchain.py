"""The Go that builds the programs of a cluster: the one on the PATH, or one fetched from Go's module proxy.

Nothing is installed: a fetched toolchain is in the cache beside the programs. (Debian 12's Go 1.19 is too old.)
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

VERSION = "go1.26.8"
"""Version that is fetched if Go is missing or too old for the modules."""
SUMS = {
    "x86_64": ("linux-amd64", "h1:ZOmGe1OnfREDMIdb1Qi4G9JSuDPBLGExZMQ4nis1RXM="),
    "aarch64": ("linux-arm64", "h1:sYL/O6MqS68ML0kjsQ36WoYIpJqkw60TxizWUYUKQMc="),
}
"""Machine → (platform, checksum from sum.golang.org)."""
_TIMEOUT_SECONDS = 120.0
_log = logging.getLogger(__name__)


class NoToolchainError(RuntimeError):
    """No suitable Go is installed, and none can be fetched."""


def find(module: Path, cache: Path) -> tuple[Path, str]:
    """Return the ``go`` program for ``module`` (a directory with go.mod) and its version, such as ``go1.26.8``.

    Raises:
        NoToolchainError: the message names the version to install.
    """
    found = shutil.which("go")
    problem = "there is no Go on the PATH"
    if found:
        version, problem = _version(Path(found), module)
        if version:
            return Path(found), version
    _log.info("%s: fetching %s", problem, VERSION)
    program = _fetch(cache, problem)
    version, problem = _version(program, module)
    if version is None:
        raise NoToolchainError(f"{program} does not work: {problem}")
    return program, version


def _version(program: Path, module: Path) -> tuple[str | None, str]:
    """Return (version, "") of ``program`` for ``module`` (it may fetch a newer toolchain), or (None, problem)."""
    done = subprocess.run([program, "env", "GOVERSION"], cwd=module, capture_output=True, text=True)
    version = done.stdout.strip()
    if done.returncode == 0 and _numbers(version) >= _needed(module):
        return version, ""
    return None, f"{program} is too old ({(done.stderr.strip() or version).splitlines()[-1]})"


def _needed(module: Path) -> tuple[int, ...]:
    return _numbers(next(line for line in (module / "go.mod").read_text().splitlines() if line.startswith("go ")))


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version: (1, 26) of go1.26.8 and of go1.26rc1."""
    found = re.match(r"go ?(\d+)\.(\d+)", version)
    return tuple(int(number) for number in found.groups()) if found else ()


def _fetch(cache: Path, why: str) -> Path:
    """Return the ``go`` program of VERSION in ``cache``; fetch and verify it if it is missing."""
    if platform.machine() not in SUMS:
        raise NoToolchainError(f"{why}; install Go {VERSION.removeprefix('go')} or later from https://go.dev/dl")
    target, checksum = SUMS[platform.machine()]
    home = cache / f"{VERSION}.{target}"
    if (home / "bin" / "go").exists():
        return home / "bin" / "go"
    name = f"golang.org/toolchain@v0.0.1-{VERSION}.{target}"
    url = f"{_proxy()}/{name.replace('@', '/@v/')}.zip"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        archive = Path(scratch, "go.zip")
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer, archive.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except (urllib.error.URLError, TimeoutError) as error:
            raise NoToolchainError(
                f"{why}, and {url} cannot be fetched ({error}); install Go {VERSION.removeprefix('go')} or later "
                "from https://go.dev/dl (Debian 12's package golang is too old)"
            ) from error
        with zipfile.ZipFile(archive) as members:
            if (sum_ := module_sum(members)) != checksum:
                raise NoToolchainError(f"{url} has the checksum {sum_} instead of {checksum}")
            members.extractall(scratch)
        unpacked = Path(scratch, name)
        for program in [*unpacked.glob("bin/*"), *unpacked.glob("pkg/tool/**/*")]:
            program.chmod(0o755)  # module archives carry no modes
        os.rename(unpacked, home)
    return home / "bin" / "go"


def module_sum(archive: zipfile.ZipFile) -> str:
    """Return the checksum of a module archive as go.sum writes it ("h1:", https://go.dev/ref/mod#go-sum-files)."""
    lines = [f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}\n" for name in sorted(archive.namelist())]
    return "h1:" + base64.b64encode(hashlib.sha256("".join(lines).encode()).digest()).decode()


def _proxy() -> str:
    """Return the first module proxy of GOPROXY, or Go's own."""
    for entry in os.environ.get("GOPROXY", "").replace("|", ",").split(","):
        if entry.startswith("http"):
            return entry.rstrip("/")
    return "https://proxy.golang.org"
