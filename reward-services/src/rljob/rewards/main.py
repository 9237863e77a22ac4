"""Entry point of a reward service."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

from rljob.protocol.environment import read_environment


def main() -> None:
    """Serve the reward called RLJOB_NAME; exit code 2 when there is none or its surroundings are not right."""
    logging.basicConfig(
        level=os.environ.get("RLJOB_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        environment = read_environment()
        spec = {reward.name: reward for reward in environment.job.spec.rewards}.get(environment.name)
        if spec is None:
            raise ValueError(f"RLJOB_NAME is {environment.name!r}, which is no reward of the job; name one of them")
        import uvicorn

        from rljob.rewards.builtin import BUILTIN
        from rljob.rewards.pool import Pool
        from rljob.rewards.sdk import judge
        from rljob.rewards.server import build_app

        reward = BUILTIN[spec.builtin]([task for task in environment.job.spec.tasks if task.reward == spec.name])
        pool = Pool(partial(judge, reward, spec.name), spec.name, spec.processes, spec.timeout_seconds)
        uvicorn.run(
            build_app(pool),
            host=environment.listen_host,
            port=environment.listen_port,
            loop="uvloop",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,  # whoever waits for a verdict asks the next start for it
        )
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
