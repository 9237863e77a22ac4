"""Entry point of rljob."""

from __future__ import annotations

import sys

from rljob.api.problems import ManifestError
from rljob.cli.app import app, report


def main() -> None:
    """Run a command; errors of the user's making are sentences on stderr, never tracebacks."""
    try:
        app()
    except ManifestError as error:
        report(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
