"""Entry point of rljob. Slow imports are inside the functions: Ctrl-C during an import ends without a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command. User errors and Ctrl-C never print a traceback."""
    try:
        from rljob.cli.cluster_commands import program
        from rljob.cli.typer_app import FAILURES, app, report_failure

        try:
            app(prog_name=program())
        except FAILURES as error:
            sys.exit(report_failure(error))
    except KeyboardInterrupt:
        sys.exit(130)


def plugin() -> None:
    """Run a command as `kubectl rljob`: runs are RLJobs of a cluster."""
    try:
        from rljob.cli.cluster_commands import set_plugin_mode
    except KeyboardInterrupt:
        sys.exit(130)
    set_plugin_mode()
    main()


if __name__ == "__main__":
    main()
