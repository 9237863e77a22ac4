"""Commands on a run's checkpoints: export, evaluate."""

from __future__ import annotations

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
    run = names[0] if len(names) == 2 else None
    checkpoints.check_destination(Path(names[-1]))  # before the slow steps
    if cluster_commands.targets_cluster(context, namespace):
        step = cluster_commands.export(cluster_commands.find(run, context, namespace), Path(names[-1]), step)
    else:
        step, checkpoint = checkpoints.find(find_run.find(run), step)
        checkpoints.export(checkpoint, Path(names[-1]))
    echo(f"{names[-1]}: the model of step {step}")


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
    step, checkpoint = checkpoints.find(directory, step)
    model = evaluated_model(directory, step, checkpoint)
    job = evaluation_job(directory.job(), model, directory.path, problems, overrides or [])
    path = evaluation_path(directory, step, job)
    job = job_checks.prepare(job, RunDirectory(path), report)
    run_job(job, write_yaml(to_data(job)).encode(), path, screen_for(RunOutput(stderr=True), live=True))
    status = RunDirectory(path).status()
    if output is Format.JSON:
        results = status_data(status)["evaluations"] if status is not None else []
        print_json({"step": step, "directory": str(path), "results": results})
    else:
        Terminal().print(evaluation_table(step, status.evaluations if status is not None else []))
