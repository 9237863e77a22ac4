"""Entry point of a rollout worker's agent: rljob-agent."""

import logging
import sys


def main() -> None:
    """Serve the pool that the environment names; exit 2 when its engine cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import uvloop

    from rljob.protocol.environment import read_environment
    from rljob.rollout.wiring import GivenUpError, serve

    try:
        uvloop.run(serve(read_environment()))
    except (ValueError, GivenUpError) as error:
        logging.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
