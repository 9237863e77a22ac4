"""Entry point of the coordinator."""

from __future__ import annotations

import logging
import os
import sys

from rljob.protocol.environment import read_environment


def main() -> None:
    """Run the coordinator; exit code 2 when its surroundings are not right."""
    logging.basicConfig(
        level=os.environ.get("RLJOB_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        environment = read_environment()
        import uvloop

        from rljob.coordinator.service import serve

        uvloop.run(serve(environment))
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
