"""Entry point of rljob. What takes long to import is imported where Ctrl-C is minded already."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command; errors of the user's making, and Ctrl-C at any time, are never tracebacks."""
    try:
        from rljob.cli.calling import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def plugin() -> None:
    """Run a command as `kubectl rljob`: runs are RLJobs of a cluster."""
    try:
        from rljob.cli.clusters import be_plugin
    except KeyboardInterrupt:
        sys.exit(130)
    be_plugin()
    main()


if __name__ == "__main__":
    main()
