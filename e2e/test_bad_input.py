"""Errors of the environment before and during a run: one clear message, an exit code, no process and no file left.

Manifests that are wrong by themselves are in cli/tests/test_bad_manifests.py.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from e2e.fakes.fork_server import rljob_command
from e2e.fakes.model import write_model
from rljob.api.load import validate
from rljob.api.resolve import resolve, with_absolute_paths
from rljob.api.yaml_loader import write_yaml
from rljob.cli import run_control
from rljob.cli.main import main
from rljob.local import capacity, job_checks, process_cleanup, run_directory
from rljob.local.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
SPEC: dict[str, Any] = {
    "models": [{"name": "policy", "source": "model"}],
    "training": {"steps": 2, "promptsPerStep": 2, "samplesPerPrompt": 2, "maxStaleness": 0},
    "tasks": [
        {
            "name": "sums",
            "data": {"reasoningGym": {"dataset": "chain_sum"}},
            "reward": "exact",
            "sampling": {"maxTokens": 16},
        }
    ],
    "rewards": [{"name": "exact", "builtin": "reasoning_gym"}],
    "rollouts": [{"name": "main", "maxModelLength": 128}],
    "failurePolicy": {"maxRestarts": 1},
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid tiny model."""
    path = tmp_path_factory.mktemp("model") / "model"
    write_model(path)
    config = Qwen2Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


class World:
    """A directory with a manifest, a model and a path for a run; a row of the table breaks one of them."""

    def __init__(self, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.model = root / "model"
        shutil.copytree(model, self.model)
        self.data: dict[str, Any] = {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "bad"},
            "spec": copy.deepcopy(SPEC),
        }
        self.spec = self.data["spec"]
        self.task = self.spec["tasks"][0]
        self.run = root / "run"
        self.patch = monkeypatch
        self.closing = contextlib.ExitStack()

    def rows(self, text: str, **task: Any) -> None:
        """Let the task read a data file with this text."""
        (self.root / "rows.jsonl").write_text(text)
        self.task.update({"data": {"jsonl": {"path": "rows.jsonl"}}, "prompt": "{question}\n", **task})
        self.spec["rewards"] = [{"name": "exact", "builtin": "exact_match"}]

    def start_run(self) -> RunDirectory:
        """Create and return the run directory of a run of the current manifest."""
        run = RunDirectory(self.run)
        job = with_absolute_paths(resolve(validate(copy.deepcopy(self.data))), self.root)
        with run.opened(job, b""):
            pass
        return run

    def write(self, name: str, text: str = "", mode: int = 0o644) -> str:
        """Write a file; return its path."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    def tree(self) -> dict[str, bytes | None]:
        """Return all files with their content."""
        return {str(p): p.read_bytes() if p.is_file() else None for p in self.root.rglob("*") if not p.is_socket()}


@pytest.fixture
def world(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, model, monkeypatch)
    with world.closing:
        yield world
    assert process_cleanup.marked(str(tmp_path)) == []


def check_inside(job: Any, storage: Path, gpus: Any = ()) -> list[str]:
    """Replace job_checks.check_components: run the checks in this process, in a hundredth of the time."""
    stderr = io.StringIO()
    file = storage.parent / ".checked.json"
    file.write_text(job.model_dump_json(by_alias=True))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stderr):
        patch.setenv("RLJOB_JOB", str(file))
        patch.setenv("RLJOB_STORAGE", str(storage))
        for component in job_checks.CHECKED_COMPONENTS:
            importlib.import_module(f"rljob.{component}.main")._check()
    file.unlink()
    return stderr.getvalue().splitlines()


def rljob(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", ["rljob", *map(str, arguments)])
        main()
    captured = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 1), captured.out, captured.err


def named(row: str) -> str:
    """Return the test id of a row, without spaces, because reports of failed tests cut ids at a space."""
    return row.replace(" ", "-")


def put(place: Any, *path: Any) -> Callable[[World], object]:
    """Return a function for a row of the table: it sets a field of the spec."""

    def change(world: World) -> None:
        here = world.spec
        for step in path[:-1]:
            here = here.setdefault(step, {}) if isinstance(here, dict) else here[step]
        here[path[-1]] = place

    return change


def other_config(world: World, **changes: Any) -> None:
    file = world.model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def remove_digits(world: World) -> None:
    """Remove digits from the vocabulary of the tokenizer, which then drops them."""
    file = world.model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for digit in "12345":
        vocabulary[f"{digit}-{digit}"] = vocabulary.pop(digit)
    file.write_text(json.dumps(tokenizer))


def locked_run(world: World) -> None:
    run = RunDirectory(world.run)
    job = with_absolute_paths(resolve(validate(copy.deepcopy(world.data))), world.root)
    world.closing.enter_context(run.opened(job, b""))


def full_disk(free: int) -> Callable[[World], object]:
    def change(world: World) -> None:
        usage = shutil.disk_usage("/")._replace(free=free)
        world.patch.setattr(capacity.shutil, "disk_usage", lambda _: usage)

    return change


def little_memory(world: World) -> None:
    world.patch.setattr(capacity, "CGROUP_LIMITS", ())
    world.patch.setattr(capacity, "MEMINFO", Path(world.write("meminfo", "MemTotal: 200000 kB\nMemAvailable: 9 kB\n")))


ROWS: dict[str, tuple[Callable[[World], object], str]] = {
    # the model
    "no model": (
        put("elsewhere", "models", 0, "source"),
        r"spec.models\[0\].source: there is no directory .*elsewhere; ",
    ),
    "a model that is a file": (
        lambda w: put(w.write("weights.bin"), "models", 0, "source")(w),
        r"spec.models\[0\].source: there is no directory .*weights.bin; give one with a model",
    ),
    "a model without config.json": (
        lambda w: (w.model / "config.json").unlink(),
        r"spec.models\[0\].source: .*config.json",
    ),
    "a truncated config.json": (
        lambda w: (w.model / "config.json").write_text('{"model_type": "qw'),
        r"spec.models\[0\].source: .*config.json cannot be read \(.*\); save the model again",
    ),
    "a model of an unknown type": (
        lambda w: other_config(w, model_type="abacus"),
        r"source: .*model_type 'abacus' is not a caus",
    ),
    "a model without weights": (
        lambda w: (w.model / "model.safetensors").unlink(),
        r"spec.models\[0\].source: .*weights",
    ),
    "truncated weights": (
        lambda w: os.truncate(w.model / "model.safetensors", 4000),
        r"spec.models\[0\].source: .*model.safetensors",
    ),
    "a missing shard": (
        lambda w: (
            (w.model / "model.safetensors").rename(w.model / "model-1.safetensors"),
            w.write("model/model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}'),
        ),
        r"spec.models\[0\].source: .*model-2.safetensors",
    ),
    "weights of another model": (lambda w: other_config(w, hidden_size=64), r"spec.models\[0\].source: .*64"),
    "attention heads that vLLM cannot run on a CPU": (
        lambda w: other_config(w, num_attention_heads=2, num_key_value_heads=2),
        r"spec.rollouts\[0\].model: vLLM on a CPU cannot run .* heads of size 16 .*; use a model with one of 32, 64",
    ),
    "no tokenizer": (lambda w: (w.model / "tokenizer.json").unlink(), r"spec.models\[0\].source: .*tokenizer"),
    "an invalid tokenizer": (
        lambda w: w.write("model/tokenizer.json", "{}"),
        r"spec.models\[0\].source: .*tokenizer",
    ),
    "a tokenizer that does not survive its round trip": (
        remove_digits,
        r"spec.tasks\[0\]: .*tokenizer.json: the tokenizer does not survive its round trip: .* comes back as",
    ),
    "messages for a model without a chat template": (
        put([{"role": "user", "content": "{question}"}], "tasks", 0, "messages"),
        r"spec.models\[0\].source: .*chat.template",
    ),
    "longer sequences than the model supports": (
        put(512, "rollouts", 0, "maxModelLength"),
        r"spec.rollouts\[0\].maxModelLength: 512 is more than the 256 positions .*; lower it",
    ),
    # data
    "no such dataset": (
        put("chain_sun", "tasks", 0, "data", "reasoningGym", "dataset"),
        r"spec.tasks\[0\].data.*chain_sun",
    ),
    "a parameter that the dataset does not have": (
        put({"frob": 1}, "tasks", 0, "data", "reasoningGym", "config"),
        r"spec.tasks\[0\].data.reasoningGym.*frob",
    ),
    "a parameter that the dataset rejects": (
        put({"min_terms": 9, "max_terms": 2}, "tasks", 0, "data", "reasoningGym", "config"),
        r"spec.tasks\[0\].data.reasoningGym",
    ),
    "no data file": (
        lambda w: (w.rows(""), (w.root / "rows.jsonl").unlink()),
        r"spec.tasks\[0\].data.jsonl.path: there is no file .*rows.jsonl",
    ),
    "an empty data file": (lambda w: w.rows(""), r"spec.tasks\[0\].data.jsonl.*"),
    "a line that is not JSON": (
        lambda w: w.rows('{"question": "1", "answer": "1"}\nnone\n'),
        r"spec.tasks\[0\].data.jsonl.*line 2",
    ),
    "a line that is not an object": (lambda w: w.rows("[1]\n"), r"spec.tasks\[0\].data.jsonl.*"),
    "data without a column of the prompt": (
        lambda w: w.rows('{"text": "1", "answer": "1"}\n' * 40),
        r"spec.tasks\[0\].*question",
    ),
    "data without a column of the reward": (
        lambda w: w.rows('{"question": "1"}\n' * 40),
        r"spec.tasks\[0\].*answer",
    ),
    "an invalid Parquet file": (
        lambda w: (w.rows(""), w.task.update(data={"parquet": {"path": w.write("rows.parquet", "none")}})),
        r"spec.tasks\[0\].data.parquet",
    ),
    "an invalid datasets directory": (
        lambda w: (w.rows(""), w.task.update(data={"datasets": {"path": str(w.root)}})),
        r"spec.tasks\[0\].data.datasets",
    ),
    "data that no initializer writes": (
        lambda w: (w.rows(""), w.task.update(data={"jsonl": {"path": "job://rows.jsonl"}})),
        r"spec.tasks\[0\].data.jsonl.path: there is no .*run/rows.jsonl, and no initializer creates it",
    ),
    "prompts longer than the engine supports": (
        put("{question}" + "x" * 200, "tasks", 0, "prompt"),
        r"spec.tasks\[0\]: .*maxModelLength 128",
    ),
    # rewards and other programs
    "a reward's package that is not installed": (
        put([{"name": "exact", "function": "frobnicate.rewards:length"}], "rewards"),
        r"spec.rewards\[0\].function: module frobnicate.rewards cannot be imported \(ModuleNotFoundError",
    ),
    "a missing reward function": (
        put([{"name": "exact", "function": "e2e.fakes.extensions:two"}], "rewards"),
        r"spec.rewards\[0\].function: module e2e.fakes.extensions has no attribute two; correct",
    ),
    "a reward that is not a function": (
        put([{"name": "exact", "function": "e2e.fakes.extensions:__doc__"}], "rewards"),
        r"spec.rewards\[0\].function: e2e.fakes.extensions:__doc__ is of type str; name a function, a class",
    ),
    "a function that cannot be a reward": (
        put([{"name": "exact", "function": "e2e.fakes.extensions:check_target"}], "rewards"),
        r"spec.rewards\[0\].function: reward exact asks for 'row'; there are prompt, completion",
    ),
    "options of a plain function": (
        put([{"name": "exact", "function": "e2e.fakes.extensions:one", "config": {"a": 1}}], "rewards"),
        r"spec.rewards\[0\].config: e2e.fakes.extensions:one is a function, which has no options",
    ),
    "an unknown option of a user's reward": (
        put([{"name": "exact", "function": "e2e.fakes.extensions:TARGET", "config": {"tolerence": 1}}], "rewards"),
        r"spec.rewards\[0\].config.tolerence: unknown field; did you mean tolerance\?",
    ),
    "rows that a user's reward cannot score": (
        lambda w: (
            w.rows('{"question": "1", "answer": "x"}\n' * 40),
            put([{"name": "exact", "function": "e2e.fakes.extensions:TARGET"}], "rewards")(w),
        ),
        r"spec.tasks\[0\].data.jsonl.path: .*line 1: reward exact cannot score the row: column 'answer' holds",
    ),
    "a missing reward program": (
        put([{"name": "exact", "local": {"command": ["frobnicate"]}}], "rewards"),
        r"spec.rewards\[0\].local.command\[0\]: 'frobnicate' does not exist; install it, or correct it",
    ),
    "a reward program that is not executable": (
        lambda w: put([{"name": "exact", "local": {"command": [w.write("judge.py")]}}], "rewards")(w),
        r"spec.rewards\[0\].local.command\[0\]: '.*judge.py' is not executable",
    ),
    "a reward that is only a container": (
        put([{"name": "exact", "template": {"spec": {"containers": [{"name": "main", "image": "a"}]}}}], "rewards"),
        r"spec.rewards\[0\].template: a container cannot be run on this machine; add local",
    ),
    "a missing initializer": (
        put({"command": ["frobnicate", "job://model"]}, "initializer"),
        r"spec.initializer.command\[0\]: 'frobnicate' does not exist; install it, or correct it",
    ),
    "a job that is suspended": (put(True, "suspend"), r"spec.suspend: the job is suspended; set suspend: false"),
    # the machine
    "a transport without its device": (
        put("nccl", "weightSync", "transport"),
        "spec.weightSync.transport: nccl needs NVIDIA GPUs and the trainer runs on CPU",
    ),
    "a cache larger than the memory": (
        put(1 << 50, "rollouts", 0, "kvCacheBytes"),
        r"the job needs .* of memory at least, .*the key-value caches of pool main, .*; lower spec.rollouts\[0\].kvC",
    ),
    "too little memory": (
        little_memory,
        "the job needs 259 MiB of memory at least, .* and this machine has 195 MiB",
    ),
    "a full disk": (
        full_disk(1 << 20),
        r"the disk of .*run is full \(1 MiB free\); make room, or choose another --run-dir",
    ),
    "a disk too small for its checkpoints": (
        lambda w: (full_disk(40 << 20)(w), w.patch.setattr(capacity, "CHECKPOINT_BYTES", 12_000)),
        r"checkpoints of .* do not fit the disk of .*run with its 40 MiB free; lower spec.checkpoints.keep",
    ),
    # the run directory
    "a file instead of the run directory": (
        lambda w: w.write("run"),
        r"run is not a directory; choose another --run-dir",
    ),
    "a file instead of a parent directory": (
        lambda w: (w.write("runs"), setattr(w, "run", w.root / "runs/bad")),
        r"runs/bad cannot be made: Not a directory; choose another --run-dir",
    ),
    "other files in the run directory": (
        lambda w: w.write("run/thesis.tex"),
        r"holds no run but other files \(thesis.tex\); choose another",
    ),
    "a directory that is not writable": (
        lambda w: w.patch.setattr(run_directory.os, "access", lambda path, _: path != w.root),
        r"run cannot be written: .* does not allow it; choose another --run-dir",
    ),
    "a run in progress": (locked_run, r"run is in use by another rljob run; wait for it or stop it"),
    "a run of another rljob": (
        lambda w: (w.start_run().path / "version").write_text("0.0.7"),
        r"the run in .*run is of rljob 0.0.7 and this is .*; use that version to resume it, or another --run-dir",
    ),
    "a run whose manifest cannot be read": (
        lambda w: (w.start_run().path / "job.json").write_text('{"spec": {"frobnicate": 1}}'),
        r"run/job.json is of another version of rljob; use that version or another --run-dir",
    ),
    "a run of another seed": (
        lambda w: (w.start_run(), w.spec.update(seed=9)),
        r"spec.seed: the run in .*run was started with 0, not 9; give it that value, or choose another --run-dir",
    ),
    "a run with more steps": (
        lambda w: (w.start_run(), w.spec["training"].update(steps=1)),
        r"spec.training.steps: the run in .*run was started with 2, which can only be raised; 1 is lower",
    ),
    "a run of another model": (
        lambda w: (w.start_run(), shutil.copytree(w.model, w.root / "new"), put("new", "models", 0, "source")(w)),
        r"spec.models\[0\].source: the run in .*run was started with .*, not .*; give it that value",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), ROWS.values(), ids=map(named, ROWS))
def test_a_job_that_cannot_run_here_is_rejected_and_changes_no_file(
    world: World, capsys: pytest.CaptureFixture[str], change: Callable[[World], object], sentence: str
) -> None:
    world.patch.setattr(job_checks, "check_components", check_inside)
    world.patch.delattr(run_control, "run_job")  # the command must not reach the start of the run
    change(world)
    world.write("job.yaml", write_yaml(world.data))
    before = world.tree()
    code, out, err = rljob(capsys, "run", "job.yaml", "--run-dir", world.run)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert all(line.startswith("rljob: ") for line in err.splitlines()), err
    if not any(re.search(sentence, line) for line in err.splitlines()):
        raise AssertionError(f"no line matches {sentence}: {err}")
    assert world.tree() == before


def test_the_manifest_that_the_table_breaks_is_valid(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.write("job.yaml", write_yaml(world.data))
    before = world.tree()
    done = subprocess.run(
        [sys.executable, "-m", "rljob.cli.main", "validate", "job.yaml", "--run-dir", str(world.run)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "job.yaml: the RLJob bad is valid\n", "")
    assert world.tree() == before


COMMANDS: dict[str, tuple[Callable[[World], object], list[str], str]] = {
    "no manifest": (
        lambda w: None,
        ["run", "none.yaml"],
        "none.yaml: there is no such file; give the path of a manifest",
    ),
    "a directory for a manifest": (lambda w: None, ["validate", "model"], "model: cannot be read: is a directory"),
    "a manifest that is not text": (
        lambda w: (w.root / "job.yaml").write_bytes(b"\xff\xfe"),
        ["explain", "job.yaml"],
        "job.yaml: not UTF-8 at byte 0; save it as UTF-8",
    ),
    "no run": (lambda w: None, ["status"], "there is no run under runs/; give a run directory"),
    "no such run": (lambda w: None, ["logs", "trainer"], "there is no run under runs/; give a run directory"),
    "a missing run": (
        lambda w: None,
        ["stop", "sums"],
        "there is no run 'sums': give a run directory, or a name",
    ),
    "no such component": (
        lambda w: w.start_run(),
        ["logs", "run", "engine"],
        "there is no log of 'engine' in .*run/logs; name one of",
    ),
    "nothing to export": (
        lambda w: w.start_run(),
        ["export", "run", "out"],
        "has no checkpoint yet; wait for spec.checkpoints",
    ),
    "nothing to evaluate": (
        lambda w: w.start_run(),
        ["evaluate", "run"],
        "has no checkpoint yet; wait for spec.checkpoints",
    ),
    "a run that has ended": (lambda w: w.start_run(), ["top", "run"], "has ended: interrupted; rljob status shows it"),
    "an export onto files": (
        lambda w: (w.start_run(), w.write("run/checkpoints/step-000001/trainer.json"), w.write("out/thesis.tex")),
        ["export", "run", "out"],
        "out is not empty; give a directory that does not exist yet",
    ),
    "no such field": (lambda w: None, ["explain", "--field", "spec.none"], "spec.none: .*"),
}


@pytest.mark.parametrize(("change", "arguments", "sentence"), COMMANDS.values(), ids=map(named, COMMANDS))
def test_a_failing_command_reports_the_cause(
    world: World,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[World], object],
    arguments: list[str],
    sentence: str,
) -> None:
    change(world)
    before = world.tree()
    code, out, err = rljob(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert re.search(sentence, err), err
    assert world.tree() == before


# --- errors during a run: real coordinator, runner and rewards, fake engine and trainer -------------------------------

REWARD_PROGRAM = """\
import http.server, json, os, sys
REWARD = {reward}
class RewardEvaluator(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        scores = [dict(sample=item["sample"], reward=REWARD, metrics={{}}, error="") for item in items]
        body = json.dumps(dict(scores=scores)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments): pass
host, _, port = os.environ["RLJOB_LISTEN"].rpartition(":")
http.server.ThreadingHTTPServer((host, int(port)), RewardEvaluator).serve_forever()
"""


def scored_by(program: str) -> Callable[[World], object]:
    """Return a function for a row of the table: it sets a user's reward program."""

    def change(world: World) -> None:
        command = [sys.executable, world.write("judge.py", program)]
        world.spec["rewards"] = [{"name": "exact", "local": {"command": command}}]

    return change


def initialized_by(script: str) -> Callable[[World], object]:
    """Return a function for a row of the table: it sets a shell script as initializer."""
    return lambda world: world.spec.update(
        initializer={"command": [world.write("make", f"#!/bin/sh\n{script}\n", 0o755)]},
        models=[{"name": "policy", "source": "job://made"}],
    )


def port_in_use(world: World) -> None:
    listener = world.closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    world.start_run().write("ports.json", json.dumps({"coordinator": listener.getsockname()[1]}).encode())


RUN_ERRORS: dict[str, tuple[Callable[[World], object], int, str]] = {
    "a port in use": (port_in_use, 0, ""),
    "a reward that answers NaN": (
        scored_by(REWARD_PROGRAM.format(reward='float("nan")')),
        1,
        "reward exact answered something else than scores",
    ),
    "a reward that answers text": (
        scored_by(REWARD_PROGRAM.format(reward='"good"')),
        1,
        "no sample could be finished",
    ),
    "a reward that exits at once": (
        scored_by("raise SystemExit(3)"),
        1,
        r"reward-exact exited with code 3 and exceeded spec.failurePolicy.maxRestarts \(1\)",
    ),
    "a reward that rejects its configuration": (
        scored_by("raise SystemExit(2)"),
        2,
        "reward-exact rejects its configuration; see the end",
    ),
    "an initializer that fails": (
        initialized_by("echo no network; exit 3"),
        1,
        "the initializer exited with code 3; see",
    ),
    "an initializer that rejects its configuration": (
        initialized_by("exit 2"),
        2,
        "the initializer exited with code 2; see the end of its",
    ),
    "an initializer that makes no model": (
        initialized_by("exit 0"),
        1,
        "source: the initializer created no directory .*made",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("change", "expected", "sentence"), RUN_ERRORS.values(), ids=map(named, RUN_ERRORS))
def test_an_error_during_a_run_ends_it_with_one_message(
    world: World, change: Callable[[World], object], expected: int, sentence: str
) -> None:
    change(world)
    world.write("job.yaml", write_yaml(world.data))
    program = [ROOT / "e2e/fakes/rljob_run.py", "run", "job.yaml", "--run-dir", world.run]
    process = rljob_command(program, {"PYTHONPATH": str(ROOT)})
    out, err = process.communicate(timeout=200)
    assert process.returncode == expected, err + out
    assert "Traceback" not in err
    assert re.search(sentence, err), err
    assert process_cleanup.marked(str(world.root)) == []


def test_a_crashed_check_is_not_a_configuration_error(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.patch.setattr(job_checks, "_planned_checks", lambda *_: [("unknown", dict(os.environ))])
    world.write("job.yaml", write_yaml(world.data))
    code, _, err = rljob(capsys, "run", "job.yaml", "--run-dir", world.run)
    assert code == 1
    assert "rljob: unknown could not be checked; its output" in err
    assert not world.run.exists()


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_unknown_argument_of_the_engine_is_rejected_by_the_engine(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.patch.setattr(job_checks, "CHECKED_COMPONENTS", ("rollout",))
    world.spec["rollouts"][0]["args"] = ["--frobnicate"]
    world.write("job.yaml", write_yaml(world.data))
    before = world.tree()
    code, out, err = rljob(capsys, "run", "job.yaml", "--run-dir", world.run)
    assert (code, out) == (2, "")
    assert re.search(r"^rljob: spec.rollouts\[0\].args: .*--frobnicate", err, re.MULTILINE), err
    assert world.tree() == before


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_engine_that_cannot_start_ends_the_run_with_the_error_of_its_log(world: World) -> None:
    other_config(world, max_position_embeddings=1 << 16)
    world.spec["rollouts"][0] |= {"kvCacheBytes": 1 << 20, "maxModelLength": 1 << 16}  # one sequence does not fit
    world.write("job.yaml", write_yaml(world.data))
    world.patch.setenv("FAKES", json.dumps({"rollout": "e2e.fakes.impatient_agent"}))
    world.patch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "e2e.fakes.rljob_run", "run", "job.yaml", "--run-dir", str(world.run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert re.search(r"^rljob: rollout-main-0: rollouts: pool 'main' .*KV cache", done.stderr, re.MULTILINE)
    assert done.stderr.splitlines()[-1] == f"{world.run}/logs/rollout-main-0.log"
    assert process_cleanup.marked(str(world.root)) == []
