"""Commands on a manifest: validate, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rljob.api.explain import explain as expanded
from rljob.api.explain import explain_field, manifest_page
from rljob.api.load import load
from rljob.cli.options import File, Overrides, RunDir, default_directory, report
from rljob.local import preflight
from rljob.local.run_directory import RunDirectory


def validate(
    file: File,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    static: Annotated[
        bool,
        typer.Option(
            "--static",
            help="Check the manifest only, not this machine: models, data, rewards, memory, disk, run directory.",
        ),
    ] = False,
) -> None:
    """Check a manifest and this machine, and report every problem."""
    job = load(file, overrides or [])
    if not static:
        preflight.prepare(job, RunDirectory(default_directory(run_dir, job.metadata.name)), report)
    typer.echo(f"{file}: the RLJob {job.metadata.name} is valid")


def explain(
    file: Annotated[Path | None, typer.Argument(help="The manifest, a YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    field: Annotated[str | None, typer.Option("--field", metavar="PATH", help="Explain one field instead.")] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Print the page on all fields instead.")] = False,
) -> None:
    """Show a manifest with presets and defaults expanded, or what a field means."""
    if (file is not None) + (field is not None) + docs != 1:
        report("give one of FILE, --field PATH and --docs")
        raise typer.Exit(2)
    if file is not None:
        text = expanded(load(file, overrides or []))
    else:
        text = explain_field(field) if field is not None else manifest_page()
    typer.echo(text, nl=False)
