"""Scores of recorded samples, for `rljob reward check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REWARD = """
import os
print("import")
class Prints:
    def __init__(self): print("init")
    def set_up(self): os.write(1, b"set up")
    def __call__(self, completion):
        print("score", flush=True)
        return 1.0
"""


def test_what_a_reward_prints_is_no_score(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(REWARD)
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [{"name": "sums", "data": {"jsonl": {"path": "a"}}, "reward": "r"}],
        "rewards": [{"name": "r", "function": "prints:Prints"}],
        "rollouts": [{"name": "main"}],
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
    (tmp_path / "job.json").write_text(json.dumps(job))
    item = {"sample": "g0.0", "task": "sums", "prompt": "", "completion": "2", "finish": "stop", "problem": {}}
    done = subprocess.run(
        [sys.executable, "-m", "rljob.rewards.offline"],
        input=json.dumps({"item": item, "rewards": {"r": 0.5}}).encode(),
        env=os.environ
        | {"RLJOB_JOB": str(tmp_path / "job.json"), "RLJOB_STORAGE": str(tmp_path), "RLJOB_NAME": "r"}
        | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["recorded"], found["reward"], found["error"]) == (0.5, 1.0, "")
    assert all(text in done.stderr for text in (b"import", b"init", b"set up", b"score"))
