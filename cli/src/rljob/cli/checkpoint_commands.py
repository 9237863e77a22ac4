"""Commands on a run's checkpoints: export, evaluate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rljob.api.explain import to_data
from rljob.api.yaml_loader import write_yaml
from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import RUN_HELP, Format, LocalRunName, Output, Overrides, complete_runs, echo, print_json, report
from rljob.local import checkpoints, find_run, job_checks
from rljob.local.errors import CliError
from rljob.local.evaluation import evaluated_model, evaluation_job, evaluation_path
from rljob.local.local_run import run_job
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import RunOutput, Terminal, screen_for
from rljob.local.snapshot_view import evaluation_table
from rljob.protocol.run_status import status_data

Step = Annotated[
    int | None, typer.Option("--step", min=0, help="The checkpoint's step. Default: the newest.", show_default=False)
]


def export(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] DEST",
            help=f"RUN: {RUN_HELP} DEST: a directory that does not exist, or is empty.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ],
    step: Step = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Copy a checkpoint as a Hugging Face directory: weights, configuration, tokenizer."""
    if len(names) > 2:
        raise CliError("give [RUN] DEST: at most one run, and one destination", 2)
    run, destination = names[0] if len(names) == 2 else None, names[-1]
    remote = cluster_commands.targets_cluster(context, namespace)
    if run is None and not remote:
        _refuse_name_of_run(destination)
    checkpoints.check_destination(Path(destination))  # before the slow steps
    if remote:
        job = cluster_commands.find(run, context, namespace)
        if run is None and job.namespace.has(destination):
            raise _no_destination(destination)
        step, source = cluster_commands.export(job, Path(destination), step), f"the {job.place}"
    else:
        directory = find_run.find(run)
        checkpoint = checkpoints.find(directory, step)
        checkpoints.export(checkpoint, Path(destination))
        step, source = checkpoint.step, f"the run in {directory.path}"
    echo(f"{destination}: the model of step {step} of {source}")


def _refuse_name_of_run(destination: str) -> None:
    """Refuse a destination that is, or misspells, the name of a run: the run of such a command is a mistake."""
    if find_run.exists(destination):
        raise _no_destination(destination)
    similar = find_run.similar(destination)
    if similar is not None and not os.path.lexists(destination):
        raise CliError(
            f"there is no run {destination!r}; did you mean rljob export {similar} DEST? Write {destination}/ for a "
            "directory of this name",
            2,
        )


def _no_destination(run: str) -> CliError:
    return CliError(
        f"{run} is a run; give a destination too, for example: {cluster_commands.program()} export {run} model/", 2
    )


def evaluate(
    run: LocalRunName = None,
    step: Step = None,
    problems: Annotated[
        int | None,
        typer.Option("--problems", min=1, help="Held-out problems per task. Default: from the manifest."),
    ] = None,
    overrides: Overrides = None,
    output: Output = Format.TEXT,
) -> None:
    """Evaluate a checkpoint on held-out problems, without training.

    The evaluation is a run in RUN/evaluations; the same evaluation later only shows its results.
    """
    directory = find_run.find(run)
    checkpoint = checkpoints.find(directory, step)
    step, model = checkpoint.step, evaluated_model(directory, checkpoint)
    job = evaluation_job(directory.job(), model, directory.path, problems, overrides or [])
    path = evaluation_path(directory, step, job)
    job = job_checks.prepare(job, RunDirectory(path), report)
    run_job(job, write_yaml(to_data(job)).encode(), path, screen_for(RunOutput(stderr=True), live=True))
    status = RunDirectory(path).status()
    if output is Format.JSON:
        data = status_data(status)["evaluations"] if status is not None else []
        print_json({"step": step, "directory": str(path), "results": data})
    else:
        console = Terminal()
        results = status.evaluations if status is not None else []
        console.print(evaluation_table(step, results, console.width))
