"""Injects faults into real runs: `rljob run`, two engines, the FSDP2 trainer; maxStaleness 0, 1 and 2.

    python -m e2e.soak [--engine sglang] [--seed N] [--minutes N] [--staleness N] [--only FAMILY] [--skip TEXT] ...

Each run must apply batches that were sampled after each fault, end with exit code 0 after every step was trained, and
leave no process and no file. `rljob audit` must be clean before each resume and at the end. Prints a table, then one
JSON object; --json also writes benchmarks/results/soak.json, or soak_sglang.json. SGLang needs RLJOB_SGLANG_PYTHON
(docs/sglang.md). A run that fails is kept in runs/.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import time_limit
from benchmarks.report import report
from e2e.soak import environment, results, victims
from e2e.soak.plan import FAMILIES, FULL_MINUTES, STALENESS, Plan, count, plan
from e2e.soak.results import RunResult
from e2e.soak.soak_run import SoakRun
from e2e.sums_task import SUMS
from rljob.api.tasks import Task
from rljob.trainer.example_model import Recipe, build

TIMEOUT_SECONDS = 3600.0
KEPT = Path("runs")


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m e2e.soak")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and their order (default 1)")
    parser.add_argument("--engine", choices=victims.SERVERS, default="vllm", help="of the pool (default vllm)")
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES, help="of all runs (default %(default)g)")
    parser.add_argument("--staleness", type=int, choices=STALENESS, help="only the run with this maxStaleness")
    parser.add_argument("--only", choices=FAMILIES, action="append", help="only this family of faults; repeatable")
    parser.add_argument("--skip", action="append", default=[], metavar="TEXT", help="no faults with TEXT in the name")
    parser.add_argument("--model", type=Path, help="directory of the initial model (default: build one)")
    parser.add_argument("--json", action="store_true", help="also write the result in benchmarks/results")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if options.json and (options.only or options.staleness is not None):
        parser.error("--json is for the whole soak; leave out --only and --staleness")
    return options


def selected(options: argparse.Namespace, excluded: dict[str, str]) -> Plan:
    """Return the part of the plan that the options select, without the families in ``excluded``."""
    return {
        staleness: [f for f in faults if f.family in (options.only or FAMILIES) and f.family not in excluded]
        for staleness, faults in plan(options.seed, options.minutes, tuple(options.skip)).items()
        if options.staleness in (None, staleness)
    }


def soak(plans: Plan, options: argparse.Namespace, scratch: Path, began: float) -> list[RunResult]:
    """Do the runs, each within its share of the minutes; return their results."""
    model, finished = options.model or scratch / "model", []
    if options.model is None:
        build(model, Task.model_validate(SUMS), seed=1, recipe=Recipe(working_steps=200, bare_steps=20))
    for i, (staleness, faults) in enumerate(plans.items()):
        name = f"alpha-{staleness}"
        manifest, output, result = scratch / f"{name}.yaml", scratch / f"{name}.out", RunResult(staleness)
        environment.write_manifest(manifest, model, staleness, options.engine)
        deadline = began + 60 * options.minutes * (i + 1) / len(plans)
        with environment.run_directory(scratch / name) as directory:
            run = SoakRun(manifest, staleness, directory, options.seed, output)
            asyncio.run(run.run(faults, deadline, result))
            with result.checking("no file is left"):
                environment.check_files()
            if result.failed:
                kept = environment.keep(directory, output, KEPT)
                again = " ".join([*(one for one in sys.argv[1:] if one != "--json"), f"--staleness {staleness}"])
                sys.stderr.write(f"the failed run is in {kept.absolute()}; again: python -m e2e.soak {again}\n")
        finished.append(result)
    return finished


def main() -> None:
    """Run the soak; exit code 1 when a target is missed."""
    options = parse()
    try:
        environment.enter_namespaces("e2e.soak")
    except environment.NoNamespacesError as error:
        sys.exit(f"python -m e2e.soak: {error}")
    time_limit.limit("e2e.soak", options.timeout)
    began = time.monotonic()
    not_run = environment.families_not_run()
    plans = selected(options, not_run)
    for family, reason in not_run.items():
        sys.stderr.write(f"family {family} is not run: {reason}\n")
    planned = sum(map(count, plans.values()))
    sys.stderr.write(f"{planned} faults, seed {options.seed}\n{results.header()}")
    with tempfile.TemporaryDirectory(prefix="rljob-soak-", ignore_cleanup_errors=True) as scratch:
        temporary = Path(scratch) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        runs = soak(plans, options, Path(scratch), began)
    seconds = time.monotonic() - began
    settings = {"seed": options.seed, "engine": options.engine, "planned": planned, "not_run": not_run}
    in_part = options.only or options.staleness is not None
    min_faults = planned if in_part else results.MIN_FAULTS
    targets = results.targets(runs, seconds, options.minutes, list(not_run), min_faults)
    name = "soak" if options.engine == "vllm" else f"soak_{options.engine}"
    report(name, results.figures(runs, seconds, settings), targets, options.json)
    sys.exit(not all(one["holds"] for one in targets.values()))


if __name__ == "__main__":
    main()
