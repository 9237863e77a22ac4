"""Makes a reward service of a function.

    from rljob.rewards.sdk import serve

    def reward(completion, problem):
        return float(problem["answer"] in completion)

    serve(reward)

A reward is a plain function of one finished sample. It names what it wants: ``prompt`` and ``completion`` (text, as
given to and written by the model), ``finish`` (stop | length), ``problem`` (the row of the task's data, its columns
renamed), ``task`` (name). It returns a number, or a number and a mapping of other numbers, which become metrics.
Whatever else it does (raise, answer nan, hang, crash) is recorded as the sample's error. It is called in worker
processes; what the program loads before ``serve`` they all have.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

import uvicorn

from rljob.api.roles import Reward as Settings
from rljob.protocol.environment import LOG_LEVEL, ComponentEnvironment, read_environment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.startup import end_on_sigterm, host_and_port
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.pool import Pool
from rljob.rewards.server import build_app

Reward: TypeAlias = Callable[..., float | tuple[float, Mapping[str, float]]]
"""A reward: a function, or an object that is called like one."""

DRAIN_SECONDS = 20
"""Most that a service which is told to end in a pod takes over the samples it has: they are finished within the pod's
grace. On one machine the next start is asked for them."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def serve(reward: Reward) -> None:
    """Serve ``reward`` until SIGTERM, as the reward of the job that started this program.

    Its entry in the manifest says how many processes score and how long one sample may take. Started by hand, for a
    reward with ``url``, the program serves at RLJOB_LISTEN (HOST:PORT) with one process. Exits with 2 when the function
    cannot be a reward.
    """
    end_on_sigterm()
    logging.basicConfig(level=os.environ.get(LOG_LEVEL, "INFO"), format=FORMAT)
    try:
        if os.environ.get("RLJOB_JOB"):
            environment = read_environment()
            settings, listen = settings_of(environment), environment.listen
        else:
            settings = Settings(name="reward")
            listen = os.environ.get("RLJOB_LISTEN", "127.0.0.1:8000")
        run(reward, settings, listen)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def settings_of(environment: ComponentEnvironment) -> Settings:
    """Return the entry of the manifest that this process serves.

    Raises:
        ValueError: RLJOB_NAME is no reward of the job.
    """
    for settings in environment.job.spec.rewards:
        if settings.name == environment.name:
            return settings
    raise ValueError(f"RLJOB_NAME is {environment.name!r}, which is no reward of the job; name one of them")


def run(reward: Reward, settings: Settings, listen: str) -> None:
    """Serve ``reward`` at ``listen`` (HOST:PORT) until SIGTERM, and then finish what was asked before it.

    Raises:
        ValueError: the function cannot be a reward.
    """
    host, port = host_and_port(listen)
    # uvicorn has a handler of its own while it serves, and raises the signal again after it: an end in good order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pool = Pool(RewardEvaluator(reward, settings.name), settings.name, settings.processes, settings.timeout_seconds)
    uvicorn.run(
        build_app(pool),
        host=host,
        port=int(port),
        loop="uvloop",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=DRAIN_SECONDS if os.environ.get("RLJOB_INSTANCE") else 1,
    )
