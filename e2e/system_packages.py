"""Debian packages that some tests need, from requirements/system.sh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


def require_packages(purpose: str) -> None:
    """Install the packages of a purpose, as root; skip the test if some are missing and this user cannot.

    ``purpose``: argument of requirements/system.sh.
    """
    done = subprocess.run(
        [_ROOT / "requirements/system.sh", sys.executable, purpose], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(done.stderr.strip())
