"""A part that loads ends when it is told to, also as the first process of a container."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rljob.protocol.ending import end_on_sigterm

LOADS = "{first}; print('loads', flush=True); import time; time.sleep(60)"
HANDLED = "from rljob.protocol.ending import end_on_sigterm; end_on_sigterm()"


def first_process(program):
    """Start ``program`` as the first process of a PID namespace."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _pending(pid):
    """Return the set of signals that wait for a process and its first thread, as bits."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:")))


@pytest.mark.skipif(os.getuid() != 0, reason="namespaces are root's")
@pytest.mark.parametrize(("first", "ends"), [(HANDLED, True), ("pass", False)])
def test_the_first_process_of_a_container_ends_at_once_while_it_loads(first, ends):
    with first_process(LOADS.format(first=first)) as started:
        assert started.stdout.readline() == "loads\n"
        [child] = map(int, Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split())
        os.kill(child, signal.SIGTERM)
        if ends:
            assert started.wait(60) == 128 + signal.SIGTERM
        else:  # without a handler the signal is dropped: it does not even wait
            assert _pending(child) == 0
            os.kill(child, signal.SIGKILL)


def test_elsewhere_a_signal_does_what_it_always_does():
    before = signal.getsignal(signal.SIGTERM)
    end_on_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before
