"""SGLang's server as the agent starts it, whose second worker fails when a test asks for it.

    python sglang_with_faults.py -m rljob.rollout.adapters.sglang.main [SGLang's arguments]

The file that FAULT_FILE names holds the fault of the next update: BYTES or LATE. The processes that the server spawns
import this module, too.
"""

import os
import sys
from pathlib import Path

FAULT_FILE = "TEST_FAULT_FILE"
BYTES = "bytes"
"""The worker receives other bytes than the first one."""
LATE = "late"
"""The worker fails when all members have received everything and compared it."""
RANK = 2  # of the second worker in the weight group

_SCRIPT = """#!/bin/sh
case "$2" in
rljob.rollout.adapters.sglang.main) exec {python} {module} "$@" ;;
*) exec {python} "$@" ;;
esac
"""


def write_interpreter(path: Path, python: str) -> None:
    """Write a program that is like the interpreter ``python``, but runs SGLang's server with faults."""
    path.write_text(_SCRIPT.format(python=python, module=__file__))
    path.chmod(0o755)


class _Corrupting:
    """A wire of the weight group that changes the sign of a number of each bucket."""

    def __init__(self, wire):
        self._wire = wire

    def begin_receive(self, group, bucket, deadline):
        wait = self._wire.begin_receive(group, bucket, deadline)

        def corrupt():
            wait()
            bucket[3] ^= 0x80

        return corrupt


def _install():
    from rljob.transfer import receiver

    plain = receiver.receive_round

    def receive_round(group, *arguments):
        file = Path(os.environ[FAULT_FILE])
        fault = file.read_text() if group.rank == RANK and file.exists() else ""
        wire = group.wire
        if fault == BYTES:
            group.wire = _Corrupting(wire)
        try:
            digest = plain(group, *arguments)
        finally:
            group.wire = wire
        if fault == LATE:
            raise RuntimeError("the fault of this test")
        return digest

    receiver.receive_round = receive_round


if FAULT_FILE in os.environ:
    _install()

if __name__ == "__main__":
    del sys.argv[1:3]
    from rljob.rollout.adapters.sglang.main import main

    main()
