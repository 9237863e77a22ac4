"""Entry point of the trainer: one process per rank, started by rljob.trainer.launch or alone. With ``--check`` it only
prints the problems that would prevent a start."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from rljob.protocol.environment import read_environment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR


def main() -> None:
    """Read the environment, then import the heavy modules and run."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s")
    if sys.argv[1:] == ["--check"]:
        sys.exit(_check())
    try:
        environment = read_environment()
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
    _end_on_signal()
    from rljob.trainer.loop import run

    sys.exit(run(environment))


def _check() -> int:
    """Report the problems, one per line; return the exit code."""
    from rljob.protocol.startup import report_problems
    from rljob.trainer import preflight

    return report_problems(lambda: preflight.check(read_environment()))


def _end_on_signal() -> None:
    """Make SIGTERM and SIGINT end this process at once, also while its main thread waits inside a collective, and also
    as the first process of a container. No data is lost: checkpoints are renamed when complete, and steps are repeated.
    The exit code is not 0, because a Kubernetes Job would count 0 as a complete training, and the launcher would wait
    for the other ranks."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before other threads are started, because they inherit the mask

    def wait() -> None:
        number = signal.sigwait(signals)
        logging.info("ended by %s", signal.Signals(number).name)
        os._exit(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()


if __name__ == "__main__":
    main()
