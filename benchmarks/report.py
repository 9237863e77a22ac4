"""The output of every benchmark: one JSON object of figures and targets."""

from __future__ import annotations

import argparse
import json
import operator
import platform
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

COMPARISONS = {">=": operator.ge, "<=": operator.le}


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of a command-line option: names of ``known``, comma-separated."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")
        return names

    return parse


def target(value: float, comparison: str, bound: float) -> dict[str, Any]:
    """Return a target: the measured value, the bound, and whether the value meets the bound."""
    return {"value": value, "target": bound, "holds": bool(COMPARISONS[comparison](value, bound))}


def report(name: str, figures: dict[str, Any], targets: dict[str, Any], keep: bool) -> None:
    """Print the object; with ``keep`` also write it to benchmarks/results/NAME.json."""
    if keep:
        save(name, figures, targets)
    sys.stdout.write(_text(name, figures, targets) + "\n")


def save(name: str, figures: dict[str, Any], targets: dict[str, Any]) -> None:
    """Write the object to benchmarks/results/NAME.json."""
    path = Path(__file__).with_name("results") / f"{name}.json"
    path.write_text(_text(name, figures, targets) + "\n")


def _text(name: str, figures: dict[str, Any], targets: dict[str, Any]) -> str:
    return json.dumps({"benchmark": name, "figures": figures, "targets": targets, "cpu": cpu()}, indent=2)


def cpu() -> str:
    """Return the architecture of the CPU and its widest vector extension."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    return f"{platform.machine()}{' avx512' if 'avx512f' in flags else ' avx2' if 'avx2' in flags else ''}"
