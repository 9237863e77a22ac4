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
import contextlib
import logging
import os
import signal
import socket
import sys
from types import FrameType

from rljob.api.rewards import Scorer
from rljob.api.roles import Reward
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.environment import LOG_LEVEL, ComponentEnvironment, read_environment, remove_token
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.http_server import HttpServer, token_check
from rljob.protocol.score_messages import MAX_REQUEST_BYTES
from rljob.protocol.startup import end_on_sigterm, host_and_port
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.orphans import adopt_orphans, keep_reaping
from rljob.rewards.pool import Pool
from rljob.rewards.server import build_app

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20
"""Maximum time to finish received samples after SIGTERM in a pod; the pod's grace period is longer. On one machine the
service does not wait: the runner sends these samples again after the next start."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def serve(reward: Scorer) -> None:
    """Serve ``reward`` until SIGTERM, as the reward of the job that started this program.

    The entry in the manifest sets the number of worker processes and the time limit per sample. Only the job's runner,
    which sends RLJOB_TOKEN, gets scores. A program that a user starts, for a reward with ``url``, serves everyone at
    RLJOB_LISTEN (HOST:PORT) with one process. Exits with code 2 if the function cannot be a reward.
    """
    end_on_sigterm()
    logging.basicConfig(level=os.environ.get(LOG_LEVEL, "INFO"), format=FORMAT)
    try:
        if os.environ.get("RLJOB_JOB"):
            environment = read_environment()
            remove_token()
            entry, listen, token = reward_of(environment), environment.listen, environment.token
        else:
            entry, token = Reward(name="reward"), ""
            listen = os.environ.get("RLJOB_LISTEN", "127.0.0.1:8000")
        run(RewardEvaluator(reward, entry.name), entry, listen, token)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def reward_of(environment: ComponentEnvironment) -> Reward:
    """Return the entry of the manifest that this process serves.

    Raises:
        ValueError: RLJOB_NAME is not a reward of the job.
    """
    for reward in environment.job.spec.rewards:
        if reward.name == environment.name:
            return reward
    raise ValueError(f"RLJOB_NAME is {environment.name!r}, which is not a reward of the job; name one of them")


def run(evaluator: RewardEvaluator, reward: Reward, listen: str, token: str) -> None:
    """Serve ``evaluator`` at ``listen`` (HOST:PORT) until SIGTERM, then finish the samples received before it.

    Args:
        evaluator: scores one sample in a worker process.
        reward: entry of the manifest.
        listen: address.
        token: that requests for scores must send; empty: none.
    """
    host, port = host_and_port(listen)
    adopt_orphans()
    # uvicorn has its own handler while it serves and raises the signal again afterwards; then exit with code 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pool = Pool(evaluator, reward.name, reward.processes, reward.timeout_seconds, reward.worker_memory)
    server = _Server(
        build_app(pool, token),
        HttpLimits(body_bytes=MAX_REQUEST_BYTES, connections=1024),  # runners of a reward with url have no token
        token_check([token] if token else []),
        host=host,
        port=int(port),
        loop="uvloop",
        log_config=None,
        log_level="warning",  # the end of the log is part of the message when a reward ends a run
        timeout_graceful_shutdown=DRAIN_SECONDS if os.environ.get("RLJOB_INSTANCE") else 1,
    )
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C in a terminal
        server.run()
    if not server.started:
        sys.exit(1)


class _Server(HttpServer):
    """Logs when it serves and why it ends."""

    signal = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._reaping = asyncio.create_task(keep_reaping())  # the loop holds tasks by weak references only
        if self.started:
            log.info("serving at %s:%d", self.config.host or "*", self.config.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("received %s; finishing the samples received before it", self.signal)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(sig).name
        super().handle_exit(sig, frame)
