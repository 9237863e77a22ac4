"""The command that shows the state of a run: status."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Annotated

import typer

from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import Format, Output, RunName, echo, print_json
from rljob.local import find_run
from rljob.local.errors import CliError
from rljob.local.screen import LiveScreen, Terminal
from rljob.local.snapshot import RunSnapshot, take_snapshot
from rljob.local.snapshot_view import draw, plain_lines

WATCH_SECONDS = 1.0


def status(
    run: RunName = None,
    output: Output = Format.TEXT,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until the run ends.")] = False,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show the state of a run: steps, time left, reward, evaluations, components.

    Exit code: 0 when it is running or has succeeded, 1 when it failed, 3 when it is unfinished and not running.
    """
    take = _source(run, context, namespace)
    snapshot = take()
    console = Terminal()
    if watch and console.is_terminal and output is Format.TEXT:
        with LiveScreen(console) as screen:
            while snapshot.running:
                screen.show(snapshot)
                time.sleep(WATCH_SECONDS)
                snapshot = _refreshed(take, snapshot)
    elif watch:
        while snapshot.running:
            _print(snapshot, output, console)
            time.sleep(WATCH_SECONDS)
            snapshot = _refreshed(take, snapshot)
    _print(snapshot, output, console)
    raise typer.Exit(snapshot.exit_code)


def _source(run: str | None, context: str | None, namespace: str | None) -> Callable[[], RunSnapshot]:
    if cluster_commands.targets_cluster(context, namespace):
        return cluster_commands.find(run, context, namespace).snapshot
    directory = find_run.find(run)
    return lambda: take_snapshot(directory)


def _refreshed(take: Callable[[], RunSnapshot], before: RunSnapshot) -> RunSnapshot:
    """Return a new snapshot; if it cannot be taken now, the one before with the reason as its note."""
    try:
        return take()
    except CliError as error:
        if error.exit_code != 1:
            raise
        return dataclasses.replace(before, note=error.sentence)


def _print(snapshot: RunSnapshot, output: Format, console: Terminal) -> None:
    if output is Format.JSON:
        print_json(snapshot.data())
    elif console.is_terminal:
        console.print(draw(snapshot, console.width))
    else:
        for line in plain_lines(snapshot):
            echo(line)
