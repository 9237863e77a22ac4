"""Steps per second of rljob compared with TRL's GRPOTrainer: the same model, prompts, batch and optimizer.

    python -m benchmarks.peers --json [--tasks quickstart,long_tail] [--repeats 3,3] [--keep] [--timeout SECONDS]

TRL runs in an environment of its own (requirements/peers.txt), made once in the user's cache. For each task both
systems train from the same model on problems of the same distribution; they alternate ``--repeats`` times (one pair of
runs takes three minutes for the quickstart and half an hour for the long tail, on two cores). The first steps of a run
(`WARM_UP`) are not counted, and neither are the start of the processes and of the engine: the whole time of each run is
a figure of its own. Ratios are medians of the pairs.

- ``quickstart``: the task of examples/quickstart.yaml, whose model is made once by its initializer's function;
- ``long_tail``: 26 M parameters; answers have 32 to 1,024 tokens, log-normal, the same for all answers of a prompt. The
  reward is a bit of the answer's checksum. In rljob each length is a task; in TRL a logits processor ends a row. The
  model is random, so one token in 2,048 ends an answer earlier.

TRL computes on a CPU without vLLM here: its weight transfer to a vLLM server needs CUDA.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import yaml
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks import time_limit
from benchmarks.report import names_of, report, target
from rljob.api.tasks import Task
from rljob.protocol.run_status import decode_status
from rljob.trainer.example_model import build, train_tokenizer
from tools.cached_environment import cached_environment

TIMEOUT_SECONDS = 7200.0
ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart.yaml"
REQUIREMENTS = ROOT / "requirements/peers.txt"
WARM_UP = 2
"""Steps of each run that are not counted."""
VOCABULARY = 2048
LENGTHS, SHORTEST, LONGEST = 16, 32, 1024
MEDIAN, SIGMA = 128.0, 0.9
"""Of the log-normal distribution of answer lengths, before they are clipped."""


@dataclass(frozen=True)
class Comparison:
    """One task for both systems.

    Attributes:
        manifest: of rljob.
        peer: arguments of benchmarks/peers_trl.py.
        at_least: bound of the ratio of the steps per second.
    """

    manifest: dict[str, Any]
    peer: dict[str, Any]
    at_least: float


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        steps_per_second: after the first steps.
        reward: mean of the counted steps.
        seconds: of the whole process.
    """

    steps_per_second: float
    reward: float
    seconds: float


def quickstart(directory: Path) -> Comparison:
    """Return the task of the quickstart."""
    manifest = yaml.safe_load(QUICKSTART.read_text())
    spec, steps = manifest["spec"], 30
    del spec["initializer"], spec["evaluation"]
    build(directory / "model", Task.model_validate(spec["tasks"][0]), seed=1)
    spec["models"] = [{"name": "policy", "source": str(directory / "model")}]
    spec["training"]["steps"] = steps
    spec["checkpoints"] = {"everySteps": steps}
    task, training = spec["tasks"][0], spec["training"]
    source = task["data"]["reasoningGym"]
    size = training["promptsPerStep"] * steps
    problems = reasoning_gym.create_dataset(source["dataset"], size=size, seed=1_000_003, **source["config"])
    rows = [{"prompt": task["prompt"].format(**entry), "entry": entry} for entry in problems]
    peer = _peer(directory, rows, spec, task["sampling"]["maxTokens"]) | {"reasoning_gym": source["dataset"]}
    return Comparison(manifest, peer, 1.8)


def long_tail(directory: Path) -> Comparison:
    """Return the task with answers of very different lengths."""
    words = [f"problem {n} of {n % 97}" for n in range(4096)]
    tokenizer = train_tokenizer(words)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lengths, steps, prompts = quantiles(), 6, 8
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    spec = {
        "seed": 1,
        "models": [{"name": "policy", "source": str(directory / "model")}],
        "training": {"steps": steps, "promptsPerStep": prompts, "samplesPerPrompt": 8, "maxStaleness": 1},
        "algorithm": {"preset": "grpo"},
        "tasks": [
            {
                "name": f"length-{length}",
                "data": {"jsonl": {"path": str(rows)}},
                "prompt": "{text}\n",
                "reward": "bit",
                "sampling": {"temperature": 1, "maxTokens": length},
            }
            for length in lengths
        ],
        "rewards": [{"name": "bit", "function": "benchmarks.peers_reward:reward"}],
        "trainer": {"microbatchTokens": 8192, "optimizer": {"learningRate": 1.0e-5}},
        "rollouts": [{"name": "main", "maxModelLength": 1152, "kvCacheBytes": 4 << 30, "maxConcurrency": 128}],
        "checkpoints": {"everySteps": steps},
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "long-tail"}, "spec": spec}
    order = [lengths[(5 * i) % LENGTHS] for i in range(prompts * steps)]  # each step has short and long ones
    drawn = [{"prompt": f"{words[i]}\n", "length": length} for i, length in enumerate(order)]
    return Comparison(manifest, _peer(directory, drawn, spec, LONGEST), 3.0)


def quantiles() -> list[int]:
    """Return LENGTHS lengths that share out the log-normal distribution equally."""
    normal = statistics.NormalDist(math.log(MEDIAN), SIGMA)
    values = (math.exp(normal.inv_cdf((i + 0.5) / LENGTHS)) for i in range(LENGTHS))
    return [min(LONGEST, max(SHORTEST, round(value))) for value in values]


def _peer(directory: Path, rows: list[dict[str, Any]], spec: dict[str, Any], longest: int) -> dict[str, Any]:
    path = directory / "peer-rows.json"
    path.write_text(json.dumps(rows))
    training = spec["training"]
    return {
        "model": str(directory / "model"),
        "rows": str(path),
        "steps": training["steps"],
        "prompts": training["promptsPerStep"],
        "group": training["samplesPerPrompt"],
        "learning_rate": spec["trainer"]["optimizer"]["learningRate"],
        "longest": longest,
        "seed": spec["seed"],
    }


TASKS = {"quickstart": quickstart, "long_tail": long_tail}


def run_rljob(comparison: Comparison, directory: Path) -> Run:
    """Run the manifest with `rljob run`.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    manifest = directory / "job.yaml"
    manifest.write_text(yaml.safe_dump(comparison.manifest))
    command = [sys.executable, "-m", "rljob.cli.main", "run", str(manifest), "--run-dir", str(directory / "run")]
    began = time.perf_counter()
    subprocess.run([*command, "--no-screen"], check=True, stdout=sys.stderr, cwd=ROOT)
    seconds = time.perf_counter() - began
    history = decode_status((directory / "run/status.json").read_bytes()).history
    shutil.rmtree(directory / "run")
    return _run([point.seconds for point in history], [point.reward for point in history], seconds)


def run_peer(comparison: Comparison, directory: Path, python: Path) -> Run:
    """Run TRL.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    result = directory / "peer.json"
    options = json.dumps(comparison.peer | {"result": str(result), "output": str(directory / "output")})
    began = time.perf_counter()
    subprocess.run(
        [python, "-c", "from benchmarks.peers_trl import main; main()", options],
        check=True,
        stdout=sys.stderr,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)},
    )
    seconds = time.perf_counter() - began
    steps = json.loads(result.read_text())
    return _run(steps["seconds"], steps["rewards"], seconds)


def _run(ends: list[float], rewards: list[float], seconds: float) -> Run:
    """``ends``: times at which the steps ended."""
    counted = len(ends) - WARM_UP
    return Run(counted / (ends[-1] - ends[WARM_UP - 1]), statistics.mean(rewards[WARM_UP:]), seconds)


def repeats_of(text: str) -> list[int]:
    """Return the value of --repeats."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1, or several, comma-separated")
    return [int(part) for part in parts]


def main() -> None:
    """Compare all tasks and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    some = f"comma-separated, of {', '.join(TASKS)}"
    parser.add_argument("--tasks", type=names_of(TASKS), default=[*TASKS], help=some)
    each = "runs of each system: one number, or one for each task"
    parser.add_argument("--repeats", type=repeats_of, default=[3], help=each)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/peers.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if len(options.repeats) not in (1, len(options.tasks)):
        parser.error(f"--repeats: give one number, or one for each of the {len(options.tasks)} tasks")
    repeats = options.repeats * (len(options.tasks) if len(options.repeats) == 1 else 1)
    time_limit.limit("benchmarks.peers", options.timeout)
    python = cached_environment("peers", REQUIREMENTS)
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name, pairs_of_task in zip(options.tasks, repeats, strict=True):
        with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
            comparison = TASKS[name](Path(folder))
            pairs = []
            for _ in range(pairs_of_task):
                pairs.append((run_rljob(comparison, Path(folder)), run_peer(comparison, Path(folder), python)))
                sys.stderr.write(f"{name}: rljob {pairs[-1][0]}, TRL {pairs[-1][1]}\n")
        for system, runs in zip(("rljob", "trl"), zip(*pairs, strict=True), strict=True):
            figures[f"{name}_{system}_steps_per_second"] = [run.steps_per_second for run in runs]
            figures[f"{name}_{system}_reward"] = [run.reward for run in runs]
            figures[f"{name}_{system}_seconds"] = [run.seconds for run in runs]
        ratio = statistics.median(ours.steps_per_second / theirs.steps_per_second for ours, theirs in pairs)
        targets[f"{name}_over_trl"] = target(ratio, ">=", comparison.at_least)
    report("peers", figures, targets, options.keep)


if __name__ == "__main__":
    main()
