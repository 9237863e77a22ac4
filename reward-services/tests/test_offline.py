"""Scores of recorded samples, for `rljob reward check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PRINTS = """
import os
print("import")
class Prints:
    def __init__(self): print("init")
    def set_up(self): os.write(1, b"set up")
    def __call__(self, completion):
        print("score", flush=True)
        return 1.0
"""


CRASHES = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
class Crashes:
    def set_up(self):
        with open(here / "set_ups", "a") as file: file.write("x")
        while os.stat(here / "set_ups").st_size > 1 and not (here / "logged").exists():  # after the crash
            time.sleep(0.001)
    def __call__(self, completion):
        if completion == "die": os._exit(3)
        return 1.0
"""
CHECK = """
import pathlib, sys, types
from rljob.rewards import offline, pool
here = pathlib.Path(sys.argv[1])
def warning(*message):
    original(*message)
    if "no worker has been set up" in message[0]: (here / "logged").touch()
original, pool.log.warning = pool.log.warning, warning
pool.SET_UP_SECONDS = 0.1
offline.time = types.SimpleNamespace(perf_counter=lambda: float((here / "set_ups").stat().st_size))
sys.exit(offline.main())
"""
"""Its clock counts set-ups. A set-up after a crash ends once it is logged that it takes long."""


def checked(directory: Path, module: str, reward: str, *completions: str) -> subprocess.CompletedProcess[bytes]:
    """Score samples with these completions by a reward of a module."""
    (directory / "mine.py").write_text(module)
    (directory / "set_ups").touch()
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [{"name": "sums", "data": {"jsonl": {"path": "a"}}, "reward": "r"}],
        "rewards": [{"name": "r", "function": f"mine:{reward}"}],
        "rollouts": [{"name": "main"}],
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
    (directory / "job.json").write_text(json.dumps(job))
    common = {"task": "sums", "prompt": "", "finish": "stop", "problem": {}}
    items = [{"sample": f"g{i}.0", "completion": text} | common for i, text in enumerate(completions)]
    return subprocess.run(
        [sys.executable, "-c", CHECK, str(directory)],
        input="\n".join(json.dumps({"item": item, "rewards": {"r": 0.5}}) for item in items).encode(),
        env=os.environ
        | {"RLJOB_JOB": str(directory / "job.json"), "RLJOB_STORAGE": str(directory), "RLJOB_NAME": "r"}
        | {"PYTHONPATH": str(directory)},
        capture_output=True,
    )


def test_what_a_reward_prints_is_no_score(tmp_path: Path) -> None:
    done = checked(tmp_path, PRINTS, "Prints", "2")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["recorded"], found["reward"], found["error"]) == (0.5, 1.0, "")
    assert all(text in done.stderr for text in (b"import", b"init", b"set up", b"score"))


def test_a_reward_reads_no_samples(tmp_path: Path) -> None:
    module = "import sys\nread = sys.stdin.read()\ndef reward(completion): return float(len(read))"
    done = checked(tmp_path, module, "reward", "2", "3")
    assert [json.loads(line)["reward"] for line in done.stdout.splitlines()] == [0.0, 0.0], done.stderr


def test_a_sample_waits_for_the_set_up_after_a_crash(tmp_path: Path) -> None:
    """What the service would have asked for later is asked for again, and a long set-up is logged."""
    done = checked(tmp_path, CRASHES, "Crashes", "a", "die", "b")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["reward"], each["error"]) for each in found] == [
        (1.0, ""),
        (0.0, "reward r: the worker exited (exit code 3) twice on this sample"),
        (1.0, ""),
    ]
    assert b"no worker has been set up for 0.1 s" in done.stderr
    assert found[2]["seconds"] == 0, "the set-up is no part of it"


def test_a_set_up_that_fails_is_the_reason(tmp_path: Path) -> None:
    done = checked(tmp_path, "class Fails:\n    def set_up(self): 1 / 0\n    def __call__(self): pass", "Fails", "a")
    assert (done.returncode, done.stdout) == (2, b"reward r: set_up raised ZeroDivisionError: division by zero")
    assert b"Traceback" in done.stderr
