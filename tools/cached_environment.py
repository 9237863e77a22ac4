"""Python environments beside .venv, made once in the user's cache: for packages that would not fit into .venv."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def cached_environment(
    name: str, requirements: Path, inputs: bytes = b"", prepare: Callable[[Path], None] | None = None
) -> Path:
    """Return the interpreter of an environment, which is made if its content is new.

    Args:
        name: of the environment.
        requirements: a complete list, installed with --no-deps.
        inputs: what ``prepare`` depends on.
        prepare: called with the site-packages of the new environment.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    content = hashlib.sha256(requirements.read_bytes() + inputs).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rljob")
    place = cache / f"{name}-{content}"
    python = place / "bin/python"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        uv = Path(sys.executable).with_name("uv")
        install = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "-r", requirements]
        subprocess.run(install, check=True, stdout=sys.stderr)
        if prepare is not None:
            prepare(next((place / "lib").glob("python*/site-packages")))
        (place / "complete").touch()
    return python
