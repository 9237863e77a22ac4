"""The commands of rljob. Exit codes: 0 done, 1 a failure under way, 2 bad input, 130 interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rljob.api.explain import explain as expanded
from rljob.api.explain import explain_field, manifest_page
from rljob.api.load import load
from rljob.local.errors import Interrupted, RunError
from rljob.local.run import run_job
from rljob.local.screen import Output, screen_for

app = typer.Typer(
    name="rljob",
    help="Reinforcement-learning post-training of language models, described by one manifest.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(help="The manifest, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a field: spec.training.steps=5, spec.tasks[sums].weight=2. May be repeated.",
        show_default=False,
    ),
]


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Directory of the run; an earlier run in it is resumed. Default: runs/NAME."),
    ] = None,
    no_screen: Annotated[bool, typer.Option("--no-screen", help="Print plain lines, also on a terminal.")] = False,
) -> None:
    """Run a job on this machine, or resume it."""
    job = load(file, overrides or [])
    directory = run_dir or Path("runs") / job.metadata.name
    try:
        lines = run_job(job, file.read_bytes(), directory, screen_for(Output(), live=not no_screen))
    except Interrupted:
        report(f"interrupted; the same command resumes the run in {directory}")
        raise typer.Exit(130) from None
    except RunError as error:
        report(error.sentence)
        if error.log:
            typer.echo(error.log, err=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        report(f"{directory}: {error.strerror or error}; see to it and run the same command again to go on")
        raise typer.Exit(1) from None
    for line in lines:
        typer.echo(line)


@app.command()
def validate(file: File, overrides: Overrides = None) -> None:
    """Check a manifest and say everything that is wrong with it."""
    job = load(file, overrides or [])
    typer.echo(f"{file}: the RLJob {job.metadata.name} is valid")


@app.command()
def explain(
    file: Annotated[Path | None, typer.Argument(help="The manifest, a YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    field: Annotated[
        str | None, typer.Option("--field", metavar="PATH", help="Say what one field means instead.")
    ] = None,
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


def report(message: str) -> None:
    """Print an error to stderr."""
    for line in message.splitlines():
        typer.echo(f"rljob: {line}", err=True)
