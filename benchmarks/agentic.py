"""How much a tiny model gains by RL in an environment, through the whole system: real vLLM, trainer and service.

    python -m benchmarks.agentic --json [--seeds 1,2,3] [--keep] [--timeout SECONDS]

Runs `rljob run examples/frozen_lake.yaml` once for each seed. The success rates are those of held-out lakes before the
first and after the last step: the example's rewards make the accuracy of an evaluation the success rate.
`frozen_lake_gain` is the smallest quotient of the two over the seeds. With --keep also the plots of the runs are kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import time_limit
from benchmarks.report import report, target
from rljob.local.plot import PLOT
from rljob.protocol.run_status import decode_status

TIMEOUT_SECONDS = 5400.0
EXAMPLE = Path(__file__).parents[1] / "examples/frozen_lake.yaml"
RESULTS = Path(__file__).with_name("results")
GOAL = 2.0


def run(seed: int, directory: Path, overrides: list[str]) -> dict[str, float]:
    """Run the example; return its figures.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    command = [sys.executable, "-m", "rljob.cli.main", "run", str(EXAMPLE), "--run-dir", str(directory), "--no-screen"]
    for entry in (f"spec.seed={seed}", *overrides):
        command += ["--set", entry]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    status = decode_status((directory / "status.json").read_bytes())
    before, after = status.evaluations[0], status.evaluations[-1]
    return {
        "run_seconds": time.perf_counter() - began,
        "success_before": before.accuracy,
        "success_after": after.accuracy,
        "gain": after.accuracy / max(before.accuracy, 1 / before.problems),
        "failed_samples": float(before.failed + after.failed),
    }


def main() -> None:
    """Run all seeds and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change the example")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/agentic.json and the plots")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.agentic", options.timeout)
    runs: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        for seed in (int(seed) for seed in options.seeds.split(",")):
            directory = Path(folder) / f"seed-{seed}"
            runs[seed] = run(seed, directory, options.set)
            if options.keep and (directory / PLOT).exists():
                shutil.copy(directory / PLOT, RESULTS / f"agentic-seed-{seed}.png")
    figures: dict[str, Any] = {
        f"{name}_seed_{seed}": value for seed, found in runs.items() for name, value in found.items()
    }
    gain = min(found["gain"] for found in runs.values())
    report("agentic", figures, {"frozen_lake_gain": target(gain, ">=", GOAL)}, options.keep)


if __name__ == "__main__":
    main()
