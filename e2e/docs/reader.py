"""Runs the commands of documentation pages and compares their output.

This is a separate module, because tests of pages on a cluster must not import torch, which takes seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BIN = ROOT / "e2e" / "docs" / "bin"


def shell(command: str, where: Path, code: int = 0) -> str:
    """Run a command as a reader does; return its output."""
    environment = os.environ | {
        "PATH": f"{BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=where,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def matches(expected: str, printed: str) -> bool:
    """Return whether ``printed`` matches ``expected``: … matches any text, also lines; white space may differ."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in expected.split("…")]
    return re.search(r"[\s\S]*?".join(part and rf"\s*{part}\s*" for part in parts), printed) is not None
