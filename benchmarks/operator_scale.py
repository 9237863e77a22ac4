"""The operator with 10 to 1,000 jobs of 16 pods: how time, CPU, memory and latency grow, and what bends the curve.

    python -m benchmarks.operator_scale --json [--sizes 10,30,100,300,1000] [--profile 100] [--keep]

Each size has a fresh control plane with all controllers, nodes and pods simulated by kwok, and the operator with the
chart's rights. A job runs when its condition Ready is True: all pods are ready and its coordinator, simulated by a
script, has reported. Then follow, with all jobs running: the operator at rest; edits of specs; trainers that end with
code 1; the operator and edits while all coordinators report every ten seconds; and a restart of the operator with 5 %
of the specs changed.

All processes share the cores of this machine, so the CPU time of each process is the cause of the curve where the
machine is busy. Finished sizes are kept in --directory, until the code of the operator or of this benchmark changes:
an interrupted benchmark continues with the sizes that are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks import time_limit
from benchmarks.learning_cells import Cells
from benchmarks.operator_scale_figures import growth, targets_of
from benchmarks.operator_scale_phases import measure_size
from benchmarks.operator_scale_plot import plot
from benchmarks.operator_scale_profile import measure_profile
from benchmarks.report import report

TIMEOUT_SECONDS = 10_800.0
"""An hour for all sizes on two quiet cores; the first run also builds the programs of the control plane."""
SIZES = (10, 30, 100, 300, 1000)
PODS = 16
DIRECTORY = Path("runs/operator-scale")
ROOT = Path(__file__).resolve().parents[1]
PLOT = ROOT / "docs" / "operator-scale.svg"
CODE = (
    "operator/src/**/*.py",
    "core/src/**/*.py",
    "tools/cluster/*.*",
    *(f"benchmarks/operator_{name}.py" for name in ("audit", "cluster", "jobs", "phases")),
    *(f"benchmarks/operator_scale_{name}.py" for name in ("phases", "profile", "usage")),
)
"""What the results depend on; figures and plot are made from them."""
Measurement = Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]


def positive(text: str) -> int:
    """Return a number of jobs from the command line."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of jobs; use a whole number of at least 1")
    return number


def parse_sizes(text: str) -> list[int]:
    """Return different numbers of jobs, comma-separated, the smallest first."""
    return sorted({positive(part) for part in text.split(",")})


def code_digest() -> str:
    """Return a digest of the files that the results depend on."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def run(measurement: Measurement) -> dict[str, Any]:
    """Run a measurement in a scratch directory."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as scratch:
        return asyncio.run(measurement(Path(scratch) / "size"))


def main() -> int:
    """Measure the sizes that are missing and print the result of all; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object (there is no other format)")
    text = f"numbers of jobs, comma-separated (default {','.join(map(str, SIZES))})"
    parser.add_argument("--sizes", type=parse_sizes, default=list(SIZES), help=text)
    parser.add_argument("--pods", type=int, default=PODS, help=f"pods of each job, at least 6 (default {PODS})")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two reports of one coordinator")
    parser.add_argument(
        "--profile", type=positive, metavar="JOBS", help="also profile an operator that starts JOBS jobs"
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"of finished sizes (default {DIRECTORY})")
    parser.add_argument("--plot", type=Path, help="file of the plot, for example scale.svg")
    kept = f"also write benchmarks/results/operator_scale.json and {PLOT.relative_to(ROOT)}"
    parser.add_argument("--keep", action="store_true", help=kept)
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if options.pods < 6:
        parser.error("--pods: a job has at least 6 pods")
    time_limit.limit("benchmarks.operator_scale", options.timeout)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    settings = {"pods": options.pods, "every": options.every, "cores": os.cpu_count(), "code": code_digest()}
    cells = Cells(options.directory)

    def cell(name: str, measurement: Measurement) -> dict[str, Any]:
        return cells.get(name, settings, lambda: run(measurement))

    def size(jobs: int) -> dict[str, Any]:
        return cell(f"jobs-{jobs}", lambda scratch: measure_size(jobs, options.pods, options.every, scratch))

    sizes = [size(jobs) for jobs in options.sizes]
    figures: dict[str, Any] = {"cores": os.cpu_count(), "sizes": sizes}
    if len(sizes) > 1:
        figures["growth"] = growth(sizes)
    if options.profile:
        jobs = options.profile
        figures["profile"] = cell(f"profile-{jobs}", lambda scratch: measure_profile(jobs, options.pods, scratch))
    for path in [options.plot, PLOT if options.keep else None]:
        if path:
            plot(sizes, path)
    targets = targets_of(sizes)
    report("operator_scale", figures, targets, options.keep)
    return 0 if all(found["holds"] for found in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
