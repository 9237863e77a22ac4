"""The initializer of a job in a cluster, as the process that its pod runs."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rljob.protocol import initializer_stamp

MAKE = """#!/bin/sh
test -f "$RLJOB_JOB" || exit 9
mkdir -p "$1" && echo made >> "$1/times" && echo "$RLJOB_SEED $RLJOB_STORAGE" > "$1/seen"
"""


class Pod:
    """Runs the initializer over the same storage."""

    def __init__(self, directory):
        self.storage = directory / "storage"
        self.program = directory / "make-model"
        self.spec = {
            "seed": 5,
            "initializer": {"command": [str(self.program), "job://model"]},
            "models": [{"name": "policy", "source": "job://model"}],
            "training": {"steps": 3},
            "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "exact"}],
            "rewards": [{"name": "exact", "builtin": "reasoning_gym"}],
            "rollouts": [{"name": "main"}],
        }
        self.job = directory / "job.json"
        self.write(MAKE)

    def write(self, program):
        self.program.write_text(program)
        self.program.chmod(0o755)

    def start(self, *arguments):
        self.job.write_text(json.dumps({"metadata": {"name": "sums"}, "spec": self.spec}))
        command = [sys.executable, "-m", "rljob.trainer.initialize", *arguments]
        environment = os.environ | {"RLJOB_JOB": str(self.job), "RLJOB_STORAGE": str(self.storage)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments):
        process = self.start(*(arguments or ("--", *self.spec["initializer"]["command"])))
        _, said = process.communicate(timeout=100)
        return process.returncode, said

    def times(self):
        return (self.storage / "model" / "times").read_text().count("made")


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path)


def test_it_runs_once(pod):
    assert pod.run()[0] == 0
    assert (pod.storage / "model" / "seen").read_text() == f"5 {pod.storage}\n"
    code, said = pod.run()
    assert code == 0 and "the storage holds what the initializer makes" in said
    assert pod.times() == 1


def test_it_runs_again_when_it_makes_something_else_and_nobody_works_with_it(pod):
    assert pod.run()[0] == 0
    pod.spec["seed"] = 6
    assert pod.run()[0] == 0
    assert pod.times() == 2
    initializer_stamp.mark_used(pod.storage)
    pod.spec["seed"] = 7
    assert pod.run()[0] == 0
    assert pod.times() == 2


def test_one_that_fails_is_run_again(pod):
    pod.write("#!/bin/sh\necho out of memory >&2; exit 3\n")
    code, said = pod.run()
    assert code == 3 and said.endswith("the initializer exited with code 3\n")
    pod.write(MAKE)
    assert pod.run()[0] == 0
    assert pod.times() == 1


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("#!/bin/sh\n", "spec.models[0].source: the initializer left no directory"),
        ("#!/no/such/shell\n", "spec.initializer.command: "),
    ],
)
def test_what_no_restart_mends_is_a_configuration_error(pod, program, said):
    pod.write(program)
    code, err = pod.run()
    assert code == 2 and said in err


@pytest.mark.parametrize("arguments", [("make-model",), ("--",), ("",)])
def test_it_is_told_how_to_call_it(pod, arguments):
    code, said = pod.run(*arguments)
    assert code == 2 and "usage" in said


def test_a_signal_reaches_the_command(pod):
    pod.write("#!/bin/sh\nmkdir -p $1\necho ready\nexec sleep 99\n")
    with pod.start("--", *pod.spec["initializer"]["command"]) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
