"""Shared by several commands: arguments, names of runs, and messages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rljob.api.text_escape import escape_block, escape_json, escape_line
from rljob.local import find_run, log_reader
from rljob.local.errors import CliError
from rljob.protocol.startup import MAX_PORT, has_port

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


def _directory(text: str) -> Path:
    if not text:
        raise CliError("--run-dir is empty; give a directory, or leave it out", 2)
    return Path(text)


RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        parser=_directory,
        metavar="<path>",
        help="Directory of the run; an earlier run in it is resumed. Default: runs/NAME.",
    ),
]


class Format(StrEnum):
    """Format of a command's output."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Format, typer.Option("-o", "--output", help="Text, or JSON.")]

DEFAULT_RUN = "Default: the running one, else the newest."
RUN_HELP = f"A run directory, or a name under runs/; with -n or --context the name of an RLJob. {DEFAULT_RUN}"
REMOTE_RUN_HELP = f"The name of an RLJob. {DEFAULT_RUN}"
LOCAL_RUN_HELP = f"A run directory, or a name under runs/. {DEFAULT_RUN}"


def complete_runs(incomplete: str) -> list[str]:
    """Return the names of runs that begin with ``incomplete``."""
    names = [path.name for path in find_run.known() if path.name.startswith(incomplete)]
    return [name for name in names if name == escape_line(name)]


def complete_components(incomplete: str) -> list[str]:
    """Return the names of runs, and of components of the default run, that begin with ``incomplete``."""
    try:
        components = log_reader.names(find_run.find(None).path)
    except CliError:
        components = []
    return [*complete_runs(incomplete), *(name for name in components if name.startswith(incomplete))]


RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False, autocompletion=complete_runs),
]
LocalRunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help=LOCAL_RUN_HELP, show_default=False, autocompletion=complete_runs),
]

RemoteRunName = Annotated[str | None, typer.Argument(metavar="RUN", help=REMOTE_RUN_HELP, show_default=False)]


def default_directory(run_dir: Path | None, name: str) -> Path:
    """Return the run directory of a job called ``name``."""
    return run_dir or find_run.ROOT / name


def report(message: str) -> None:
    """Print an error to stderr."""
    for line in message.splitlines():
        echo(f"rljob: {line}", err=True)


def _address(value: str) -> str:
    if not has_port(value):
        raise CliError(f"--listen {value} is not HOST:PORT with a port up to {MAX_PORT}, such as 127.0.0.1:8000", 2)
    return value


Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Address.", callback=_address)]


def become(module: str, *arguments: str) -> None:
    """Run a module in place of this process. It finds modules of the current directory."""
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], os.environ | {"PYTHONPATH": path})


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of one or several lines, with control characters as escapes."""
    typer.echo(escape_block(text), err=err, nl=nl)


def echo_json(document: str | bytes) -> None:
    """Print a JSON document. Its value is exact: control characters are escapes of JSON."""
    typer.echo(escape_json(document if isinstance(document, str) else document.decode()))


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object on a line."""
    echo_json(json.dumps(data, ensure_ascii=False))
