"""The command that shows the state of a run: status."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import Format, Output, RunName
from rljob.local import find_run
from rljob.local.errors import CliError
from rljob.local.screen import LiveScreen, Terminal, draw, plain_lines
from rljob.local.snapshot import RunSnapshot
from rljob.local.snapshot import look as look_at

if TYPE_CHECKING:
    pass

WATCH_SECONDS = 1.0


def status(
    run: RunName = None,
    output: Output = Format.TEXT,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every second until the run ends.")] = False,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show how a run is: state, steps, time left, reward, evaluations, parts.

    Exit code: 0 when it goes on or has succeeded, 1 when it failed, 3 when it is unfinished and does not go on.
    """
    look = _looker(run, context, namespace)
    glance = look()
    console = Terminal()
    if watch and console.is_terminal and output is Format.TEXT:
        with LiveScreen(console) as screen:
            while glance.going_on:
                screen.show(glance.view())
                time.sleep(WATCH_SECONDS)
                glance = _anew(look, glance)
    elif watch:
        while glance.going_on:
            _print(glance, output, console)
            time.sleep(WATCH_SECONDS)
            glance = _anew(look, glance)
    _print(glance, output, console)
    raise typer.Exit(glance.exit_code)


def _looker(run: str | None, context: str | None, namespace: str | None) -> Callable[[], RunSnapshot]:
    if cluster_commands.targets_cluster(context, namespace):
        return cluster_commands.find(run, context, namespace).look
    return functools.partial(look_at, find_run.find(run))


def _anew(look: Callable[[], RunSnapshot], before: RunSnapshot) -> RunSnapshot:
    """Look again; while that cannot be, what was seen before, and why."""
    try:
        return look()
    except CliError as error:
        if error.exit_code != 1:
            raise
        return dataclasses.replace(before, note=error.sentence)


def _print(glance: RunSnapshot, output: Format, console: Terminal) -> None:
    if output is Format.JSON:
        typer.echo(json.dumps(glance.data(), ensure_ascii=False))
    elif console.is_terminal:
        console.print(draw(glance.view(), console.width))
    else:
        for line in plain_lines(glance.view()):
            typer.echo(line)
