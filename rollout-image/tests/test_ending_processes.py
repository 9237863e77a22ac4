"""Processes of vLLM's server do not outlive the server."""

import multiprocessing
import os
import signal
import time
from functools import partial

import psutil
import pytest

from rljob.rollout.adapters.vllm.ending_processes import ending_context


def wait(pipe):
    pipe.send(os.getpid())
    time.sleep(600)


def server(method, pipe):
    child = ending_context(partial(multiprocessing.get_context, method)).Process(target=wait, args=(pipe,))
    child.start()
    child.join()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_ends_when_the_server_is_killed(method):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=server, args=(method, theirs))
    process.start()
    child = psutil.Process(ours.recv())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    psutil.wait_procs([child], 30)
    outlived = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    if outlived:
        child.kill()
    assert not outlived
