"""GRPO with a random model on NVIDIA GPUs: step time, model FLOPs utilization and time of a weight update.

    python -m benchmarks.gpu --json [--model 1.5B] [--runs fsdp:0,fsdp:1,megatron:0] [--steps 20]
        [--directory DIRECTORY] [--keep] [--timeout SECONDS]

Runs `rljob run` with a random model of Qwen2's architecture, vLLM and NCCL, once for each backend and bound of
staleness, and reads the metrics of the run. The first two steps are not counted. With two GPUs the trainer has the
first and the engine the second. With one they share it: both roles name it, and each has an NCCL_HOSTID of its own,
because NCCL refuses a communicator with one GPU twice. Then the weights travel over NCCL's sockets, and with a
staleness of 1 training and generation slow each other down; with 0 they take turns, so the times of the trainer are
its own.

`mfu` is the model's floating-point operations of a step (6 for each parameter and token, and attention) over the
time of forward and backward passes and optimizer, as a share of the vendor's dense bfloat16 peak; `of_product` is the
same as a share of the rate at which this GPU multiplies two matrices of 8,192 rows and columns, measured here.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks import time_limit
from benchmarks.report import report
from rljob.api.backend_checks import PLANNED
from rljob.api.memory_plan import TrainerSettings, plan_memory
from rljob.api.model_shape import shape_of
from rljob.protocol.gpus import Gpu, find_gpus

TIMEOUT_SECONDS = 3600.0
END = "<|endoftext|>"
PROMPTS, SAMPLES, PROMPT_BYTES = 32, 8, 128
WARM_UP = 2
"""Steps that are not counted: the first ones allocate memory and connect."""
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second by the vendor's data sheets (SXM parts)."""


class Size(NamedTuple):
    """A model and its answers. ``configuration``: of Qwen2. ``answer``: tokens of each answer, which none ends
    earlier. ``microbatch``: tokens. ``cache``: bytes of the engine's KV cache."""

    configuration: dict[str, Any]
    answer: int
    microbatch: int
    cache: int


SIZES = {
    "1.5B": Size(
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
        512,
        16_384,
        16 << 30,
    ),
    "tiny": Size(
        {
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        16,
        4096,
        256 << 20,
    ),
}
"""tiny: shows on any machine that the benchmark works."""


def make_tokenizer(entries: int) -> Qwen2Tokenizer:
    """Return a tokenizer with exactly ``entries`` entries: bytes, their pairs and triples, and END."""
    letters = sorted(ByteLevel.alphabet())
    pairs = product(letters, letters)
    triples = ((first + second, third) for first, second, third in product(letters, letters, letters))
    merges: Any = [*islice(chain(pairs, triples), max(0, entries - len(letters) - 1))]
    texts = [*letters, *("".join(merge) for merge in merges), END]
    return Qwen2Tokenizer(
        vocab={text: i for i, text in enumerate(texts)}, merges=merges, unk_token=END, eos_token=END, pad_token=END
    )


def make_model(size: Size, directory: Path) -> None:
    """Write a random model in bfloat16, with its tokenizer."""
    torch.manual_seed(1)
    tokenizer = make_tokenizer(size.configuration["vocab_size"])
    end = tokenizer.eos_token_id
    config = Qwen2Config(
        **size.configuration, tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=end
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_prompts(path: Path, steps: int) -> None:
    """Write random prompts, enough for all steps."""
    letters = random.Random(1)
    with path.open("w") as file:
        for _ in range(PROMPTS * (steps + 2)):
            file.write(json.dumps({"question": "".join(letters.choices("abcdefgh ", k=PROMPT_BYTES))}) + "\n")


class Run(NamedTuple):
    """A backend of the trainer and a bound of staleness."""

    backend: str
    staleness: int

    @property
    def name(self) -> str:
        """For files and figures."""
        return f"{self.backend}_{self.staleness}"


def runs_of(text: str) -> list[Run]:
    """Return the value of --runs."""
    found = []
    for part in text.split(","):
        backend, _, staleness = part.partition(":")
        if backend not in ("fsdp", "megatron") or not staleness.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is not a backend (fsdp, megatron), a colon and a staleness")
        found.append(Run(backend, int(staleness)))
    return found


def manifest(size: Size, folder: Path, steps: int, chosen: Run, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the job."""
    trainer: dict[str, Any] = {"backend": chosen.backend, "microbatchTokens": size.microbatch}
    pool: dict[str, Any] = {
        "name": "main",
        "maxModelLength": PROMPT_BYTES + size.answer + 128,
        "kvCacheBytes": size.cache,
    }
    if len(gpus) == 1:
        for role, name in ((trainer, "trainer"), (pool, "engine")):
            variables = [{"name": "CUDA_VISIBLE_DEVICES", "value": gpus[0].visible_as}]
            role["template"] = {"spec": {"containers": [{"name": "main", "env": variables}]}}
            role["nccl"] = {"NCCL_HOSTID": name}
        pool["args"] = ["--gpu-memory-utilization", "0.3"]  # vLLM refuses to start with less free memory than this
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "gpu"},
        "spec": {
            "seed": 1,
            "models": [{"name": "policy", "source": str(folder / "model")}],
            "training": {
                "steps": steps,
                "promptsPerStep": PROMPTS,
                "samplesPerPrompt": SAMPLES,
                "maxStaleness": chosen.staleness,
            },
            "algorithm": {"preset": "grpo"},
            "tasks": [
                {
                    "name": "letters",
                    "data": {"jsonl": {"path": str(folder / "prompts.jsonl")}},
                    "prompt": "{question}",
                    "reward": "letters",
                    "sampling": {"temperature": 1, "maxTokens": size.answer},
                }
            ],
            "rewards": [{"name": "letters", "function": "benchmarks.gpu_reward:reward"}],
            "trainer": trainer,
            "rollouts": [pool],
            "checkpoints": {"everySteps": 10_000, "keep": 1},
        },
    }


def run(job: Mapping[str, Any], folder: Path, directory: Path) -> float:
    """Run the job; return its time in seconds.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    path = folder / f"{directory.name}.yaml"
    path.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "rljob.cli.main", "run", str(path), "--run-dir", str(directory), "--no-screen"]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return time.perf_counter() - began


def figures_of(
    directory: Path, chosen: Run, size: Size, peak: float | None, product_rate: float | None
) -> dict[str, Any]:
    """Return the figures of a finished run: means of the counted steps.

    Args:
        directory: of the run.
        chosen: its backend and staleness.
        size: of the model.
        peak: operations a second of the GPU by its vendor; None: not known.
        product_rate: of a product of matrices; None: not measured.
    """
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    all_steps = [line for line in lines if line["kind"] == "step"]
    steps = all_steps[WARM_UP:]

    def mean(name: str) -> float:
        return statistics.mean(step[name] for step in steps)

    training = ("forward", "backward", "optimizer")
    computing = sum(mean(f"trainer/seconds_{name}") for name in training)
    answers = mean("response_length/mean") * mean("samples")
    work = operations(size, mean("samples"), mean("prompt_length/mean"), mean("response_length/mean"))
    shape = shape_of(directory.with_name("model"))
    assert shape is not None
    settings = TrainerSettings(1, "bfloat16", size.microbatch, packing="kernel")
    planned = plan_memory(shape, settings).device if chosen.backend == PLANNED else None
    return {
        "steps": len(steps),
        "step_seconds": (steps[-1]["seconds"] - all_steps[WARM_UP - 1]["seconds"]) / len(steps),
        **{f"{name}_seconds": mean(f"seconds/{name}") for name in ("generating", "training", "trainer_waiting")},
        "weight_update_seconds": mean("seconds/weight_updates"),
        "engine_paused_seconds": mean("engine_seconds/paused"),
        **{f"{name}_seconds": mean(f"trainer/seconds_{name}") for name in (*training, "pull")},
        "answer_tokens": answers,
        "answer_tokens_per_second": answers / mean("seconds/generating"),
        "mfu": None if peak is None else work / computing / peak,
        "of_product": None if product_rate is None else work / computing / product_rate,
        "peak_bytes": max(step["trainer/memory_peak_bytes"] for step in steps),
        "planned_bytes": planned,
        "logprob_difference": mean("trainer/logprob_diff_mean"),
        "transport": transport(directory),
    }


def operations(size: Size, samples: float, prompt: float, answer: float) -> float:
    """Return the floating-point operations of forward and backward passes over samples of these lengths: 6 for each
    parameter of a linear layer and token, and for attention, causal, 6 for each layer, hidden unit and pair of a token
    and itself or an earlier one (PaLM, arXiv 2204.02311, appendix B, halved for the mask). The output layer counts for
    tokens of answers only."""
    c = size.configuration
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    keys = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * keys + 3 * c["intermediate_size"])
    length = prompt + answer
    linear = 6 * layers * layer * length + 6 * hidden * c["vocab_size"] * answer
    return samples * (linear + 6 * layers * hidden * length**2)


def transport(directory: Path) -> str:
    """Return which transport NCCL chose, as the trainer's log says."""
    for log in sorted(directory.glob("logs/trainer*")):
        if found := re.search(r"NCCL connects engine \S+ by (.*)", log.read_text(errors="replace")):
            return found[1]
    return "not known"


def product_rate() -> float | None:
    """Return the operations a second of a product of two random matrices in bfloat16; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - began)


def main() -> None:
    """Run the jobs and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--model", choices=SIZES, default="1.5B")
    some = "backend and bound of staleness of each run, comma-separated"
    parser.add_argument("--runs", type=runs_of, default="fsdp:0,fsdp:1,megatron:0", help=some)
    parser.add_argument("--steps", type=int, default=20, help=f"of each run, at least {WARM_UP + 1}")
    parser.add_argument("--directory", type=Path, help="of the runs, which are kept (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/gpu.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: must be at least {WARM_UP + 1}")
    time_limit.limit("benchmarks.gpu", options.timeout)
    size, gpus = SIZES[options.model], find_gpus()
    name = gpus[0].name if gpus else "no GPU"
    peak = next((rate for part, rate in PEAKS.items() if part in name), None)
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as temporary:
        folder = options.directory or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rate = product_rate()
        make_model(size, folder / "model")
        torch.cuda.empty_cache()
        make_prompts(folder / "prompts.jsonl", options.steps)
        figures: dict[str, Any] = {"device": name, "gpus": len(gpus), "model": options.model, "product_rate": rate}
        for chosen in options.runs:
            directory = folder / chosen.name
            seconds = run(manifest(size, folder, options.steps, chosen, gpus), folder, directory)
            found = figures_of(directory, chosen, size, peak, rate) | {"run_seconds": seconds}
            figures |= {f"{key}_{chosen.name}": value for key, value in found.items()}
            sys.stderr.write(json.dumps(found) + "\n")
    report("gpu", figures, {}, options.keep)


if __name__ == "__main__":
    main()
