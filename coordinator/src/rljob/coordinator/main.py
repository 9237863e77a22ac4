"""Entry point of the coordinator."""

from __future__ import annotations

import logging
import os
import sys

from rljob.protocol.environment import read_environment


def main() -> None:
    """Run the coordinator. Exit code 2: wrong configuration or environment. Exit code 1: a retry may succeed."""
    logging.basicConfig(
        level=os.environ.get("RLJOB_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        environment = read_environment()
        import uvloop

        from rljob.coordinator.serve import serve
        from rljob.ledger.store import StorageInUseError

        try:
            uvloop.run(serve(environment))
        except StorageInUseError as error:  # of another job, or our previous pod on an unreachable node
            logging.error("%s", error)
            sys.exit(1)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
