"""The command that prints the logs of a run's components: logs."""

from __future__ import annotations

import functools
import itertools
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import RUN_HELP, Format, Output, complete_components, echo, print_json, report
from rljob.local import find_run, log_reader
from rljob.local.log_reader import Line
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import Terminal

if TYPE_CHECKING:
    from rljob.remote.pod_logs import PodLogs

FOLLOWED_TAIL = 20
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [COMPONENT]...",
            help=f"{RUN_HELP} Then components, for example trainer; default: all.",
            show_default=False,
            autocompletion=complete_components,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Number of last lines. Default: all, with -f 20.")
    ] = None,
    output: Output = Format.TEXT,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Print the logs of a run's components, by time.

    In a cluster a component is a role (trainer, rollout-main), all of a kind (rollout, reward, environment) or a pod.
    """
    reader: log_reader.LogReader | PodLogs
    if cluster_commands.targets_cluster(context, namespace):
        job, components = cluster_commands.find_among(names or [], context, namespace)
        reader = cluster_commands.logs(job, components, named=len(components) < len(names or []), follow=follow)
        shown, follow_lines = reader.components, reader.follow
        if follow and (message := reader.waiting_message()):
            report(message)
    else:
        directory, components = _run_and_components(names or [])
        shown = log_reader.select_components(directory.path, components)
        reader = log_reader.LogReader(directory.path, components)
        follow_lines = functools.partial(reader.follow, directory.running)
    if follow and tail is None:
        tail = FOLLOWED_TAIL
    print_line = _print_json if output is Format.JSON else _Prefixed([] if len(shown) == 1 and components else shown)
    for line in reader.history(tail):
        print_line(line)
    if follow:
        for line in follow_lines():
            print_line(line)


def _run_and_components(names: list[str]) -> tuple[RunDirectory, list[str]]:
    """Return the run and the named components. The first name may be the name of the run."""
    if names and find_run.exists(names[0]):
        return find_run.find(names[0]), names[1:]
    return find_run.find(None), names


def _print_json(line: Line) -> None:
    at = datetime.fromtimestamp(line.time).astimezone().isoformat(timespec="milliseconds")
    print_json({"time": at, "component": line.component, "line": line.text})


class _Prefixed:
    """Prints lines with the name of their component as prefix; on a terminal each component has its own colour.

    Args:
        components: names of the components; empty: no prefix.
    """

    def __init__(self, components: list[str]) -> None:
        self._console = Terminal()
        self._width = max(map(len, components), default=0)
        self._colours = dict(zip(components, itertools.cycle(COLOURS), strict=False))

    def __call__(self, line: Line) -> None:
        prefix = f"{line.component:{self._width}} | " if self._width else ""
        if self._console.color_system is None:
            echo(f"{prefix}{line.text}")
        else:
            self._console.print(Text(prefix, self._colours.get(line.component, "")), line.text, sep="", soft_wrap=True)
