"""Runs the command that is given, and says what went wrong."""

from __future__ import annotations

import sys

import typer

from rljob.api.errors import ManifestError
from rljob.cli.app import app
from rljob.cli.clusters import program
from rljob.cli.options import report
from rljob.local.errors import Interrupted, RunError


def run() -> None:
    """Run a command; errors of the user's making are sentences on stderr, never tracebacks."""
    try:
        app(prog_name=program())
    except ManifestError as error:
        report(str(error))
        sys.exit(2)
    except RunError as error:
        report(error.sentence)
        if error.log:
            typer.echo(error.log, err=True)
        sys.exit(error.exit_code)
    except Interrupted as end:
        report(f"{end.checkpoint or 'interrupted'}; the same command resumes the run")
        sys.exit(130)
    except OSError as error:
        report(f"{error.filename or 'this machine'}: {error.strerror or error}; see to it and try again")
        sys.exit(1)
