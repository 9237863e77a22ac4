"""Entry point of a rollout worker: rljob-agent. It runs the agent of a pool, or serves a frozen one.

With ``--check`` it only checks whether engines can start. With ``--worker`` it is another host of an engine that spans
hosts.
"""

import logging
import sys

from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE


def main() -> None:
    """Serve the pool that the environment names; exit with code 2 if its engine cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if sys.argv[1:] == ["--check"]:
        sys.exit(_check())
    from rljob.protocol.startup import end_on_sigterm

    end_on_sigterm()
    import uvloop

    from rljob.protocol.environment import read_environment
    from rljob.protocol.model_cache import ModelUnavailableError
    from rljob.rollout.agent_process import FatalStartError, ResourceError, serve
    from rljob.rollout.ray_node import RayEndedError
    from rljob.rollout.ray_worker import work

    run = work if sys.argv[1:] == ["--worker"] else serve
    try:
        uvloop.run(run(read_environment()))
    except (ValueError, FatalStartError) as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
    except (ResourceError, RayEndedError, ModelUnavailableError) as error:
        logging.error("%s", error)
        sys.exit(FAILURE)


def _check() -> int:
    """Report the problems, one per line; return the exit code."""
    from rljob.protocol.environment import read_environment
    from rljob.protocol.startup import report_problems
    from rljob.rollout import preflight

    return report_problems(lambda: preflight.check(read_environment()))


if __name__ == "__main__":
    main()
