"""Entry point of the operator."""

from __future__ import annotations

import logging
import sys

from rljob.operator.config import start_of


def main() -> None:
    """Run the operator until SIGTERM; exit code 2 when its settings are wrong, 1 when it lost its lease."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        start = start_of()
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)
    logging.getLogger().setLevel(start.settings.log_level)
    import uvloop

    from rljob.operator.service import serve

    sys.exit(uvloop.run(serve(start)))


if __name__ == "__main__":
    main()
