"""The reward SDK: the interface of a reward, and :func:`serve` for a user's own program.

A reward is a plain function of one finished sample:

    def reward(completion, problem):
        return float(problem["answer"] in completion)

Its parameters name the fields it needs, those of :data:`rljob.rewards.evaluate.FIELDS` (docs/data.md). It returns a
number, a number and a mapping of other numbers, which become metrics, Parts, or NotScored. It may be async, a class, or
score a batch. An exception, nan, a hang or a crash is recorded as the sample's error. Worker
processes call it; they are forked after the module is loaded.

``spec.rewards[].function: my_package.rewards:reward`` serves the function. A :class:`rljob.api.rewards.RewardKind` in
its place adds options, a row check, or a factory. A program that serves a function by itself, for ``local``,
``template`` or ``url``, calls ``serve(reward)`` at its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from types import FrameType

from rljob.api.rewards import Scorer
from rljob.api.roles import Reward
from rljob.protocol.environment import ComponentEnvironment, own_entry, read_environment, remove_token
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.score_messages import MAX_REQUEST_BYTES
from rljob.protocol.service_server import ServiceServer, start_logging
from rljob.protocol.startup import end_on_sigterm
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.orphans import adopt_orphans, keep_reaping
from rljob.rewards.pool import Pool
from rljob.rewards.server import build_app

log = logging.getLogger(__name__)


def serve(reward: Scorer) -> None:
    """Serve ``reward`` until SIGTERM, as the reward of the job that started this program.

    The entry in the manifest sets the number of worker processes and the time limit per sample. Only the job's runner,
    which sends RLJOB_TOKEN, gets scores. A program that a user starts, for a reward with ``url``, serves everyone at
    RLJOB_LISTEN (HOST:PORT) with one process. Exits with code 2 if the function cannot be a reward.
    """
    end_on_sigterm()
    start_logging()
    try:
        if os.environ.get("RLJOB_JOB"):
            environment = read_environment()
            remove_token()
            entry, listen, token = reward_of(environment), environment.listen, environment.token
            name = entry.name
        else:
            entry, token = Reward(name="reward"), ""
            listen = os.environ.get("RLJOB_LISTEN", "127.0.0.1:8000")
            name = getattr(reward, "__name__", type(reward).__name__)
        run(RewardEvaluator(reward, name), entry, listen, token)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def reward_of(environment: ComponentEnvironment) -> Reward:
    """Return the entry of the manifest that this process serves.

    Raises:
        ValueError: RLJOB_NAME is not a reward of the job.
    """
    return own_entry(environment.job.spec.rewards, environment.name, "a reward")


def run(evaluator: RewardEvaluator, reward: Reward, listen: str, token: str) -> None:
    """Serve ``evaluator`` at ``listen`` (HOST:PORT) until SIGTERM, then finish the samples received before it.

    Args:
        evaluator: scores one sample in a worker process.
        reward: entry of the manifest.
        listen: address.
        token: that requests for scores must send; empty: none.
    """
    adopt_orphans()
    pool = Pool(evaluator, evaluator.name, reward.processes, reward.timeout_seconds, reward.worker_memory)
    server = RewardServer(build_app(pool, token), listen, token, MAX_REQUEST_BYTES)
    server.pool = pool
    server.serve_until_signal()


class RewardServer(ServiceServer):
    """Reaps the processes that killed workers leave behind. ``pool``: of the application."""

    pool: Pool
    _loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._reaping = asyncio.create_task(keep_reaping(self.pool.workers))  # the loop holds tasks by weak references

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the server, also while workers are set up."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.pool.stop_waiting)  # the loop may be asleep
