"""The command that predicts a run: simulate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rljob.api.errors import ManifestError
from rljob.api.load import load
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.api.speeds import read_speeds
from rljob.cli.manifest import read_settings
from rljob.cli.options import File, Format, Output, Overrides, echo, print_json
from rljob.local.errors import CliError
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.simulation_messages import SimulationRequest, SimulationResult, SlowSplit, SplitPrediction

COLUMNS = ("engines", "GPUs rollout", "GPUs trainer", "step", "engines used", "trainer used", "staleness", "tokens/s")
MANY_DEVICES = 128
"""From so many GPUs on, the command says that it takes long."""


def simulate(
    file: File,
    engines: Annotated[
        Path,
        typer.Option(
            "--engines",
            metavar="<path>",
            help="Measured speeds of an engine and of the trainer, and the lengths of answers: a YAML file.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=2,
            help="GPUs of trainer and training engines together. Default: the manifest's, with `min` engines.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=10_000, help="Simulated steps that count.")] = 10,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="<path>", help="Write a timeline of the best split, which Perfetto shows."),
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Predict step time and utilisation, and the best split of GPUs between training and rollout.

    The coordinator and the runner run in virtual time, with simulated engines, rewards and trainer. Nothing is started.
    """
    job = resolve(load(file, overrides or []))
    speeds = read_speeds(read_settings(engines), str(engines))
    if trace is not None:
        _check_trace(trace)
    own = _own_split(job)
    request = SimulationRequest(
        job.model_dump(mode="json", by_alias=True),
        speeds.model_dump(mode="json", by_alias=True),
        gpus or own[0] * own[1] + own[2],
        steps,
        trace is not None,
    )
    if request.devices >= MANY_DEVICES:
        echo(f"rljob: simulating up to {request.devices} GPUs takes minutes", err=True)
    result = _simulated(request, str(file))
    if output is Format.JSON:
        splits = {"splits": msgspec.to_builtins(result.splits), "slow": msgspec.to_builtins(result.slow)}
        print_json({"gpus": request.devices, "best": result.best, **splits, "notes": result.notes})
    else:
        echo(_table(result, own))
    if trace is not None:  # last: what was predicted is printed, whatever happens
        trace.write_text(json.dumps(result.trace))


def _check_trace(trace: Path) -> None:
    """Refuse a path that cannot be written, before a simulation of minutes."""
    if not trace.parent.is_dir():
        problem = f"there is no directory {trace.parent}; make it first, or give another path"
    elif trace.is_dir():
        problem = f"{trace} is a directory; give the path of a file"
    elif not os.access(trace if trace.exists() else trace.parent, os.W_OK):
        problem = f"{trace} cannot be written; give another path"
    else:
        return
    raise CliError(f"--trace: {problem}", CONFIGURATION_ERROR)


def _own_split(job: RLJob) -> tuple[int, int, int]:
    """Return engines, GPUs of an engine, and GPUs of the trainer, as the manifest has them."""
    pool = next(pool for pool in job.spec.policy_pools if pool.purpose == "training")
    return pool.replicas.min, pool.parallelism.workers, job.spec.trainer.nodes * job.spec.trainer.processes_per_node


def _simulated(request: SimulationRequest, source: str) -> SimulationResult:
    """Run the simulation in a process of its own: the command line imports no component."""
    done = subprocess.run(
        [sys.executable, "-m", "rljob.simulation.main"], input=msgspec.json.encode(request), capture_output=True
    )
    if done.returncode == CONFIGURATION_ERROR:
        raise ManifestError(done.stderr.decode(errors="replace").splitlines(), source)
    if done.returncode:
        raise CliError("the simulation failed; its output", log=done.stderr.decode(errors="replace"))
    return msgspec.json.decode(done.stdout, type=SimulationResult)


def _table(result: SimulationResult, own: tuple[int, int, int]) -> str:
    engines, devices, trainer = own
    shown: list[SplitPrediction | SlowSplit] = [*result.splits, *result.slow]
    splits = sorted(shown, key=lambda split: split.engines)
    rows = [COLUMNS, *(_row(split, devices) for split in splits)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for i, split in enumerate(splits, 1):
        notes = ["best"] if split.engines == result.best else []
        notes += ["manifest"] if (split.engines, split.trainer_devices) == (engines, trainer) else []
        lines[i] += f"  {', '.join(notes)}" if notes else ""
    lines += [f"engines: {split.engines}: {split.reason}" for split in result.slow]
    lines += result.notes
    return "\n".join(lines)


def _row(split: SplitPrediction | SlowSplit, devices: int) -> tuple[str, ...]:
    numbers = (str(split.engines), str(split.engines * devices), str(split.trainer_devices))
    if isinstance(split, SlowSplit):
        return (*numbers, f"> {split.least_step_seconds:.0f} s", "-", "-", "-", "-")
    return (
        *numbers,
        f"{split.step_seconds:.1f} s",
        _part(split.engine_utilisation),
        _part(split.trainer_utilisation),
        f"{split.mean_staleness:.2f}",
        _rate(split.tokens_per_second),
    )


def _part(part: float) -> str:
    """Return a part of the time, "-" if it is 0."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}" if part else "-"


def _rate(rate: float) -> str:
    """Return tokens per second, "-" if there were none."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}" if rate else "-"
