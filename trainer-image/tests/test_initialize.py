"""The initializer of a job in a cluster, run as the process of its pod."""

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
    """Runs the initializer several times with the same storage."""

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
        _, log = process.communicate(timeout=100)
        return process.returncode, log

    def times(self):
        return (self.storage / "model" / "times").read_text().count("made")


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path)


def test_it_runs_once(pod):
    assert pod.run()[0] == 0
    assert (pod.storage / "model" / "seen").read_text() == f"5 {pod.storage}\n"
    code, log = pod.run()
    assert code == 0 and "the storage holds the result of the initializer" in log
    assert pod.times() == 1


def test_it_runs_again_if_its_inputs_changed_and_no_run_has_used_its_result(pod):
    assert pod.run()[0] == 0
    pod.spec["seed"] = 6
    assert pod.run()[0] == 0
    assert pod.times() == 2
    initializer_stamp.mark_used(pod.storage)
    pod.spec["seed"] = 7
    assert pod.run()[0] == 0
    assert pod.times() == 2


def test_it_runs_again_after_a_failure(pod):
    pod.write("#!/bin/sh\necho out of memory >&2; exit 3\n")
    code, log = pod.run()
    assert code == 3 and log.endswith("the initializer exited with code 3\n")
    pod.write(MAKE)
    assert pod.run()[0] == 0
    assert pod.times() == 1


@pytest.mark.parametrize(
    ("program", "log"),
    [
        ("#!/bin/sh\n", "spec.models[0].source: the initializer left no directory"),
        ("#!/no/such/shell\n", "spec.initializer.command: "),
    ],
)
def test_a_permanent_failure_is_a_configuration_error(pod, program, log):
    pod.write(program)
    code, err = pod.run()
    assert code == 2 and log in err


@pytest.mark.parametrize("arguments", [("make-model",), ("",)])
def test_wrong_arguments_print_the_usage(pod, arguments):
    code, log = pod.run(*arguments)
    assert code == 2 and "usage" in log


def test_a_signal_reaches_the_command(pod):
    pod.write("#!/bin/sh\nmkdir -p $1\necho ready\nexec sleep 99\n")
    with pod.start("--", *pod.spec["initializer"]["command"]) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
