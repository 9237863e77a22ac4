from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import os, signal
from rljob.rewards.orphans import adopt_orphans, reap_orphans

def children():
    return [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]

adopt_orphans()
reap_orphans([])  # there is none
"""
ORPHAN = """
said, say = os.pipe()
worker = os.fork()
if worker == 0:
    if os.fork() == 0:
        os.setsid()
        os.write(say, str(os.getpid()).encode())
    signal.pause()
orphan = int(os.read(said, 20))
os.kill(worker, signal.SIGKILL)
os.waitpid(worker, 0)
assert children() == [orphan]
reap_orphans([worker])  # it has not ended
assert children() == [orphan]
os.kill(orphan, signal.SIGKILL)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
reap_orphans([worker])
assert children() == []
"""
WORKER = """
worker = os.fork()
if worker == 0:
    os.setsid()
    os._exit(0)
os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
reap_orphans([worker])
assert children() == [worker]
"""


@pytest.mark.parametrize("script", [ORPHAN, WORKER], ids=["reaped", "left to the pool"])
def test_what_a_killed_worker_leaves_is_reaped_and_a_worker_is_left_to_the_pool(script):
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
