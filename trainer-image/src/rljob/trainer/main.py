"""Entry point of the trainer: one process per rank, started by torchrun or alone."""

from __future__ import annotations

import logging
import os
import sys

from rljob.protocol.environment import read_environment


def main() -> None:
    """Read the environment, then import what is heavy and run."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s")
    try:
        environment = read_environment()
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)
    from rljob.trainer.loop import run

    sys.exit(run(environment))


if __name__ == "__main__":
    main()
