"""Tokens per second of one optimizer step, compared with a bare transformers loop, and the balance of ranks.

    python -m benchmarks.trainer --json [--sizes 0.9M,46M] [--repeats 5] [--keep] [--timeout SECONDS]

Both programs train the same random model in this process: same microbatches, same objective, clipping and AdamW. The
first is the trainer's step (plan, tensors, FSDP2 on one rank, metrics); the second is a short loop over a plain
transformers model, which gets the tensors ready-made. Their steps alternate; the first pair is a warm-up and not
counted. ``cpu_ratio`` compares their CPU time, which depends less on what else the machine does. The peak memory
of each is that of a process of its own.

``lockstep`` is positions of the slowest rank × ranks / tokens, for 8 ranks and 512 samples of log-normal length (median
512 tokens, sigma 0.5) in 1, 4, 8 and 16 minibatches: a figure of the plan, so it does not depend on the machine.

The benchmark fails at the time-out (--timeout).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks import time_limit
from benchmarks.report import names_of, report, target
from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.api.models import LogprobTolerance
from rljob.api.roles import Trainer
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Row, lay_out
from rljob.trainer.batch_plan import BatchPlan, plan_batch
from rljob.trainer.process_group import World, join_world, leave_world, make_deterministic, set_threads
from rljob.trainer.step import apply_batch, plan_step
from rljob.trainer.step_checks import StepChecks

TIMEOUT_SECONDS = 3600.0
SEED, GROUP = 5, 8
RANKS, LOCKSTEP_SAMPLES, LOCKSTEP_BUDGET = 8, 512, 16_384
ALGORITHM = Algorithm()
fill(ALGORITHM)
SIZES: dict[str, tuple[dict[str, int], int, int]] = {
    "0.9M": ({"vocab_size": 320, "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4}, 128, 4096),
    "46M": ({"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 14}, 16, 1024),
}
"""Parameters → configuration of the model, samples of a batch, microbatchTokens."""

Step = Callable[[], None]


def make_model(size: str, directory: Path) -> int:
    """Write a random model; return its number of parameters."""
    torch.manual_seed(SEED)
    config = Qwen2Config(**SIZES[size][0], num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(size: str) -> tuple[Train, dict[int, Row]]:
    """Return a batch of random samples of log-normal length: prompts of 16 tokens, answers with a median of 48."""
    generator = np.random.default_rng(SEED)
    vocabulary, count = SIZES[size][0]["vocab_size"], SIZES[size][1]
    samples, rows = [], {}
    for i in range(count):
        answer = int(np.clip(generator.lognormal(np.log(48), 0.5), 1, 256))
        mask = np.arange(16 + answer) >= 16
        ids = generator.integers(0, vocabulary, len(mask))
        reward, name = float(i % 2), f"{i // GROUP}.{i % GROUP}"
        samples.append(BatchSample(name, str(i // GROUP), reward, 16, answer, len(mask), -1, 1.0, 256))
        rows[i] = Row(ids, np.where(mask, -np.log(vocabulary), 0).astype(np.float32), mask, np.zeros(len(mask)))
    return Train(1, 0, samples, False), rows


def trainer_step(size: str, model: Path, world: World) -> Step:
    """Return one step of rljob's trainer."""
    backend = FsdpBackend(model, Trainer(dtype="float32"), world)
    train, rows = make_batch(size)
    checks = StepChecks(LogprobTolerance(1e-4, 1e-4, "", ""))  # no sample is of the current version

    def step() -> None:
        plan = plan_step(train, ALGORITHM, world, SIZES[size][2])
        apply_batch(plan, rows, ALGORITHM, backend, world, checks)

    return step


def bare_step(size: str, model: Path, world: World) -> Step:
    """Return one step of a plain loop over the same microbatches, whose tensors are ready-made."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    settings = Trainer().optimizer
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0, foreach=True)
    train, rows = make_batch(size)
    batch = lay_out(plan_step(train, ALGORITHM, world, SIZES[size][2]), rows, ALGORITHM, world)
    advantage = {i: 1.0 if sample.reward else -1.0 for i, sample in enumerate(train.samples)}

    def loss(inputs: Any) -> Tensor:
        tokens = inputs.tokens
        advantages_B1 = torch.tensor([advantage[piece.sample] for piece in inputs.pieces]).unsqueeze(-1)
        logits = policy(input_ids=tokens.token_ids_BL, use_cache=False, logits_to_keep=tokens.keep_K).logits
        logprobs_BK = logits.log_softmax(-1).gather(-1, tokens.targets_BK.unsqueeze(-1)).squeeze(-1)
        ratio_BK = (logprobs_BK - tokens.behavior_BK).exp()
        value_BK = torch.minimum(ratio_BK * advantages_B1, ratio_BK.clamp(0.8, 1.2) * advantages_B1)
        return -(value_BK * inputs.weights_B.unsqueeze(-1)).where(tokens.mask_BK, 0.0).sum()

    def step() -> None:
        for inputs in batch.minibatches[0]:
            loss(inputs).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS: Mapping[str, Callable[[str, Path, World], Step]] = {"rljob": trainer_step, "bare": bare_step}


def alternate(size: str, model: Path, repeats: int) -> dict[str, float]:
    """Return tokens per second of both programs, and the median ratios of the counted pairs: by time and by CPU."""
    tokens = sum(sample.total_tokens for sample in make_batch(size)[0].samples)
    world = _join()
    steps = {name: make(size, model, world) for name, make in PROGRAMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(repeats + 1):
        for name in sorted(steps, reverse=pair % 2 == 1):  # each is first in every other pair
            started, used = time.perf_counter(), time.process_time()
            steps[name]()
            if pair:
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
        if pair:
            sys.stderr.write(
                f"{size}: " + ", ".join(f"{name} {each[-1]:.3f} s" for name, each in seconds.items()) + "\n"
            )
    leave_world()
    rates = {f"{name}_tokens_per_second": tokens / statistics.median(each) for name, each in seconds.items()}
    return rates | {"fsdp_ratio": _ratio(seconds), "cpu_ratio": _ratio(cpu)}


def _ratio(seconds: Mapping[str, list[float]]) -> float:
    """Return the median over the pairs of bare / rljob."""
    return statistics.median(bare / ours for ours, bare in zip(seconds["rljob"], seconds["bare"], strict=True))


def peak_memory(name: str, size: str, model: Path) -> float:
    """Return the peak resident bytes of a process that makes two steps of one program."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_two_steps, (name, size, model))


def _two_steps(name: str, size: str, model: Path) -> float:
    step = PROGRAMS[name](size, model, _join())
    step()
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _join() -> World:
    set_threads()
    world = join_world()
    make_deterministic(world.device)
    return world


def lockstep(minibatches: int) -> float:
    """Return the lockstep of 512 samples of log-normal length on 8 ranks, over five batches."""
    found = []
    for seed in range(5):
        tokens = np.random.default_rng(seed).lognormal(np.log(512), 0.5, LOCKSTEP_SAMPLES).astype(int).tolist()
        samples = [BatchSample(f"{i}", f"{i // GROUP}", 0, 1, n - 1, n, 0, 1, 4096) for i, n in enumerate(tokens)]
        trained_N = np.ones(len(samples), np.bool_)
        plan: BatchPlan = plan_batch(Train(1, 0, samples, False), trained_N, minibatches, 0, RANKS, LOCKSTEP_BUDGET)
        found.append(plan.lockstep)
    return statistics.mean(found)


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    some = f"of {', '.join(SIZES)}, comma-separated"
    parser.add_argument("--sizes", type=names_of(SIZES), default=[*SIZES], help=some)
    parser.add_argument("--repeats", type=int, default=5, help="counted pairs of steps of each size")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/trainer.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.trainer", options.timeout)
    figures: dict[str, Any] = {f"lockstep_{count}_minibatches": lockstep(count) for count in (1, 4, 8, 16)}
    targets = {"lockstep": target(max(figures.values()), "<=", 1.15)}
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
            found: dict[str, float] = {"parameters": make_model(size, Path(folder))}
            found |= {f"{name}_peak_bytes": peak_memory(name, size, Path(folder)) for name in PROGRAMS}
            found |= alternate(size, Path(folder), options.repeats)
        figures |= {f"{name}_{size}": value for name, value in found.items()}
        targets[f"fsdp_ratio_{size}"] = target(found["fsdp_ratio"], ">=", 0.95)
    report("trainer", figures, targets, options.keep)


if __name__ == "__main__":
    main()
