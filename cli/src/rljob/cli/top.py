"""The command that shows the resource usage of a run, live: top."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import Format, Output, RunName, print_json
from rljob.local import find_run
from rljob.local.errors import CliError
from rljob.local.process_usage import ProcessUsageMeter, Usage
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import LiveScreen, Terminal
from rljob.local.snapshot import RunSnapshot, take_snapshot
from rljob.local.snapshot_view import draw_usage

FIRST_SECONDS = 0.5


def top(
    run: RunName = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Number of refreshes before exiting. Default: one when piped, else until the end."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", "-d", min=0.1, help="Between two refreshes.")] = 2.0,
    output: Output = Format.TEXT,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show CPU and memory of every component, requests of every engine, queues, time by activity, and what was lost."""
    console = Terminal()
    live = console.is_terminal and output is Format.TEXT
    frames = _frames(_source(run, context, namespace), count if live else count or 1, seconds)
    if output is Format.JSON:
        for snapshot in frames:
            print_json(snapshot.data())
    elif live and count is None:
        with LiveScreen(console, draw_usage) as screen:
            for snapshot in frames:
                screen.show(snapshot)
    else:
        for snapshot in frames:
            console.print(draw_usage(snapshot, console.width if console.is_terminal else 0))


def _source(run: str | None, context: str | None, namespace: str | None) -> Callable[[], RunSnapshot]:
    """Return a function that takes snapshots whose components have their usage."""
    if cluster_commands.targets_cluster(context, namespace):
        return cluster_commands.usage_source(cluster_commands.find(run, context, namespace))
    return _local(find_run.find(run))


def _local(directory: RunDirectory) -> Callable[[], RunSnapshot]:
    meter = ProcessUsageMeter(directory.path)
    meter.read()

    def take() -> RunSnapshot:
        snapshot, usage = take_snapshot(directory), meter.read()
        for component in snapshot.components:
            component.usage = usage.get(component.name, Usage(0, 0.0, 0))
        return snapshot

    return take


def _frames(take: Callable[[], RunSnapshot], count: int | None, seconds: float) -> Iterator[RunSnapshot]:
    """Yield ``count`` snapshots of a running run, or as many as there are until it ends."""
    for shown in itertools.count():
        if shown == count:
            return
        time.sleep(FIRST_SECONDS if shown == 0 else seconds)
        snapshot = take()
        if not snapshot.running and shown:
            return
        if not snapshot.running:
            raise CliError(f"the run in {snapshot.location} has ended: {snapshot.state}; rljob status shows it", 2)
        yield snapshot
