"""The command that shows what a run takes and does, live: top."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import Format, Output, RunName
from rljob.local import find_run
from rljob.local.errors import CliError
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import Terminal, draw_head
from rljob.local.snapshot import RunSnapshot, look
from rljob.local.usage import Meter, Usage
from rljob.local.view import metrics
from rljob.protocol.status import RunStatus

if TYPE_CHECKING:
    from rljob.remote.job import RemoteJob

FIRST_SECONDS = 0.5
ACTIVITY = "seconds_"
UNKNOWN = "–"


def top(
    run: RunName = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="So many pictures, then end. Default: one when piped, else until the end."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", "-d", min=0.1, help="Between two pictures.")] = 2.0,
    output: Output = Format.TEXT,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show processor and memory of every part, requests of every engine, queues, and what time goes into."""
    console = Terminal()
    live = console.is_terminal and output is Format.TEXT
    pictures = _pictures(_source(run, context, namespace), count if live else count or 1, seconds)
    if output is Format.JSON:
        for glance, usage in pictures:
            typer.echo(json.dumps(_data(glance, usage), ensure_ascii=False))
    elif live and count is None:
        with Live(console=console, auto_refresh=False, transient=True) as picture:
            for glance, usage in pictures:
                picture.update(_draw(glance, usage), refresh=True)
    else:
        for glance, usage in pictures:
            console.print(_draw(glance, usage))


Picture = tuple[RunSnapshot, dict[str, Usage]]
"""A run, and what each of its parts takes, where that is known."""


def _source(run: str | None, context: str | None, namespace: str | None) -> Callable[[], Picture]:
    """Return what takes a picture."""
    if cluster_commands.targets_cluster(context, namespace):
        return _remote(cluster_commands.find(run, context, namespace))
    return _local(find_run.find(run))


def _local(directory: RunDirectory) -> Callable[[], Picture]:
    meter = Meter(directory.path)
    meter.read()

    def take() -> Picture:
        glance, usage = look(directory), meter.read()
        return glance, {part.name: usage.get(part.name, Usage(0, 0.0, 0)) for part in glance.parts}

    return take


def _remote(job: RemoteJob) -> Callable[[], Picture]:
    meter = cluster_commands.meter(job)

    def take() -> Picture:
        glance = job.look()
        pods, usage = meter.read()
        return dataclasses.replace(glance, parts=pods, note="; ".join(filter(None, (glance.note, meter.note)))), usage

    return take


def _pictures(take: Callable[[], Picture], count: int | None, seconds: float) -> Iterator[Picture]:
    """Yield ``count`` pictures of a run that goes on, or as many as there are until it ends."""
    for shown in itertools.count():
        if shown == count:
            return
        time.sleep(FIRST_SECONDS if shown == 0 else seconds)
        glance, usage = take()
        if not glance.going_on and shown:
            return
        if not glance.going_on:
            raise CliError(f"the run in {glance.where} has ended: {glance.state}; rljob status shows it", 2)
        yield glance, usage


def _data(glance: RunSnapshot, usage: dict[str, Usage]) -> dict[str, Any]:
    taken = {name: dataclasses.asdict(part) for name, part in usage.items()}
    return {**glance.data(), "parts": [part | taken.get(part["name"], {}) for part in glance.data()["parts"]]}


def _draw(glance: RunSnapshot, usage: dict[str, Usage]) -> Group:
    lines: list[RenderableType] = [draw_head(glance.view()), "", _parts(glance, usage)]
    if glance.note:
        lines.append(Text(glance.note, style="yellow"))
    for table in (_engines(glance.status), _flow(glance.status)) if glance.status is not None else ():
        lines += ["", table] if table.row_count else []
    return Group(*lines)


def _parts(glance: RunSnapshot, usage: dict[str, Usage]) -> Table:
    counted = any(taken.processes is not None for taken in usage.values())  # of pods nobody says how many they have
    table = _table("part", "state", "cpu %", "memory", *(["processes"] if counted else []), "restarts")
    for part in glance.parts:
        taken = usage.get(part.name)
        cells = [UNKNOWN] * 2 if taken is None else [f"{100 * taken.processor:.0f}", _memory(taken)]
        if counted:
            cells.append(UNKNOWN if taken is None or taken.processes is None else str(taken.processes))
        table.add_row(part.name, part.state, *cells, str(part.restarts))
    return table


def _memory(taken: Usage) -> str:
    return f"{taken.memory / (1 << 20):,.0f} MiB"


def _engines(status: RunStatus) -> Table:
    table = _table("engine", "state", "running", "waiting", "restarts")
    for part in status.parts:
        if part.role == "agent":
            table.add_row(part.instance[:24], part.state, str(part.running), str(part.waiting), str(part.restarts))
    return table


def _flow(status: RunStatus) -> Table:
    """Return samples by where they are, tokens, and where the time goes, side by side."""
    figures = metrics(status)
    rows = [(queue.name, f"{queue.value:,}") for queue in status.queues]
    rows += [
        (f"seconds {name.removeprefix(ACTIVITY).replace('_', ' ')}", f"{value:,.0f}")
        for name, value in figures.items()
        if name.startswith(ACTIVITY)
    ]
    if "tokens_per_second" in figures:
        rows.append(("tokens/s", f"{figures['tokens_per_second']:,.0f}"))
    table = _table("figure", "now")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 or heading == "state" else "right")
    return table
