"""Processes that end when their parent process ends."""

import signal
import subprocess
import sys

import psutil


def test_a_process_dies_with_its_parent():
    child = (
        "import os, time\n"
        "from rljob.protocol.parent_death import die_with_parent\n"
        "die_with_parent(os.getppid())\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(99)\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        orphan = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    orphan.wait(60)


def test_a_process_whose_parent_is_dead_already_ends_at_once():
    program = "from rljob.protocol.parent_death import die_with_parent; die_with_parent(1 << 30)"
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
