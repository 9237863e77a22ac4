"""Commands that look at a run: status, logs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rljob.cli import clusters
from rljob.cli.clusters import Context, Namespace
from rljob.cli.options import RUN_HELP, Format, Output, RunName, complete_parts, report
from rljob.local import logs as part_logs
from rljob.local import runs
from rljob.local.directory import RunDirectory
from rljob.local.errors import RunError
from rljob.local.glance import Glance
from rljob.local.glance import look as look_at
from rljob.local.logs import Line
from rljob.local.screen import LiveScreen, Terminal, draw, plain_lines

if TYPE_CHECKING:
    from rljob.remote.logs import Logs

WATCH_SECONDS = 1.0
FOLLOWED_TAIL = 20
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


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


def _looker(run: str | None, context: str | None, namespace: str | None) -> Callable[[], Glance]:
    if clusters.meant(context, namespace):
        return clusters.find(run, context, namespace).look
    return functools.partial(look_at, runs.find(run))


def _anew(look: Callable[[], Glance], before: Glance) -> Glance:
    """Look again; while that cannot be, what was seen before, and why."""
    try:
        return look()
    except RunError as error:
        if error.exit_code != 1:
            raise
        return dataclasses.replace(before, note=error.sentence)


def _print(glance: Glance, output: Format, console: Terminal) -> None:
    if output is Format.JSON:
        typer.echo(json.dumps(glance.data(), ensure_ascii=False))
    elif console.is_terminal:
        console.print(draw(glance.view(), console.width))
    else:
        for line in plain_lines(glance.view()):
            typer.echo(line)


def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [PART]...",
            help=f"{RUN_HELP} Then parts, for example trainer; all when none is named.",
            show_default=False,
            autocompletion=complete_parts,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only so many last lines. Default: all, with -f 20.")
    ] = None,
    output: Output = Format.TEXT,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Print what the parts of a run wrote, by time.

    In a cluster a part is a role (trainer, rollout-main), all of a kind (rollout, reward) or a pod.
    """
    reader: part_logs.Reader | Logs
    if clusters.meant(context, namespace):
        job, parts = clusters.find_among(names or [], context, namespace)
        reader = clusters.logs(job, parts, named=len(parts) < len(names or []), follow=follow)
        chosen, following = reader.parts, reader.follow
        if follow and (why := reader.awaited()):
            report(why)
    else:
        directory, parts = _run_and_parts(names or [])
        chosen = part_logs.chosen(directory.path, parts)
        reader = part_logs.Reader(directory.path, parts)
        following = functools.partial(reader.follow, directory.running)
    if follow and tail is None:
        tail = FOLLOWED_TAIL
    show = _as_json if output is Format.JSON else _Prefixed([] if len(chosen) == 1 and parts else chosen)
    for line in reader.history(tail):
        show(line)
    if follow:
        for line in following():
            show(line)


def _run_and_parts(names: list[str]) -> tuple[RunDirectory, list[str]]:
    """Return the run and the parts that are meant: the first name may be the run's."""
    if names and (runs.is_run(Path(names[0])) or runs.is_run(runs.ROOT / names[0])):
        return runs.find(names[0]), names[1:]
    return runs.find(None), names


def _as_json(line: Line) -> None:
    at = datetime.fromtimestamp(line.time).astimezone().isoformat(timespec="milliseconds")
    typer.echo(json.dumps({"time": at, "part": line.part, "line": line.text}, ensure_ascii=False))


class _Prefixed:
    """Prints lines with their part's name before them, in a colour of its own on a terminal.

    Args:
        parts: to be told apart; no prefix when there is none.
    """

    def __init__(self, parts: list[str]) -> None:
        self._console = Terminal()
        self._width = max(map(len, parts), default=0)
        self._colours = dict(zip(parts, itertools.cycle(COLOURS), strict=False))

    def __call__(self, line: Line) -> None:
        prefix = f"{line.part:{self._width}} | " if self._width else ""
        if self._console.color_system is None:
            typer.echo(f"{prefix}{line.text}")
        else:
            self._console.print(Text(prefix, self._colours.get(line.part, "")), line.text, sep="", soft_wrap=True)
