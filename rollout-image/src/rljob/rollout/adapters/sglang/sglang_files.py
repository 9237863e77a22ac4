"""Keeps files of SGLang's server out of /dev/shm.

There they would stay if the agent is killed, or hangs, before it has listed them; the server's temporary directory is
removed with the server in any case.
"""

from __future__ import annotations

import os
import tempfile
import threading

from sglang.srt.managers import load_snapshot
from tqdm import tqdm


def avoid_shared_memory() -> None:
    """Let this process keep the load of the schedulers in the temporary directory, and use no semaphore for tqdm's
    bars."""
    load_snapshot.shm_path_for = load_path
    tqdm.set_lock(threading.RLock())


def load_path(ipc_name: str) -> str:
    """Return the path of the file with the load. ``ipc_name``: the name of SGLang's socket, the same in all processes
    of a server."""
    return os.path.join(tempfile.gettempdir(), f"load-{os.path.basename(ipc_name)}")
