"""Tokens per second of one optimizer step, compared with a bare transformers loop, and the balance of ranks.

    python -m benchmarks.trainer --json [--sizes 0.9M,46M] [--layouts megatron_dp2] [--repeats 5] [--keep] [--timeout S]

Both programs train the same random model in this process: same microbatches, same objective, clipping and AdamW. The
first is the trainer's step (plan, tensors, FSDP2 on one rank, metrics); the second is a short loop over a plain
transformers model, which gets the tensors ready-made. Their steps alternate; the first pair is a warm-up and not
counted. ``cpu_ratio`` compares their CPU time, which depends less on what else the machine does. The peak memory
of each is that of a process of its own.

``megatron_dp2_ratio``, ``megatron_tp2_ratio`` and ``megatron_pp2_ratio`` compare steps of two Megatron-Core processes,
each with one thread, with the same bare loop, which has two threads. Their peak memory is that of both processes.

``lockstep`` is positions of the slowest rank × ranks / tokens, for 8 ranks and 512 samples of log-normal length (median
512 tokens, sigma 0.5) in 1, 4, 8 and 16 minibatches: a figure of the plan, so it does not depend on the machine.

The benchmark fails at the time-out (--timeout).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import time_limit
from benchmarks.megatron_ranks import LAYOUTS, MegatronRanks
from benchmarks.process_counters import peak_memory_bytes
from benchmarks.report import names_of, report, target
from benchmarks.trainer_steps import GROUP, PROGRAMS, SIZES, bare_step, make_batch, make_model
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.batch_plan import BatchPlan, plan_batch
from rljob.trainer.process_group import World, join_world, leave_world, make_deterministic, set_threads

TIMEOUT_SECONDS = 3600.0
RANKS, LOCKSTEP_SAMPLES, LOCKSTEP_BUDGET = 8, 512, 16_384


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


def megatron(layout: str, size: str, model: Path, repeats: int) -> dict[str, float]:
    """Return the median ratio bare / Megatron-Core of alternating steps, tokens per second, and the peak memory."""
    tokens = sum(sample.total_tokens for sample in make_batch(size)[0].samples)
    seconds: dict[str, list[float]] = {"rljob": [], "bare": []}
    with MegatronRanks(layout, size, model) as ranks:
        bare = bare_step(size, model, _join())
        bare()
        for _ in range(repeats):
            seconds["rljob"].append(ranks.step())
            started = time.perf_counter()
            bare()
            seconds["bare"].append(time.perf_counter() - started)
            shown = ", ".join(f"{name} {each[-1]:.3f} s" for name, each in seconds.items())
            sys.stderr.write(f"{size} {layout}: {shown}\n")
        leave_world()
        return {
            f"{layout}_ratio": _ratio(seconds),
            f"{layout}_tokens_per_second": tokens / statistics.median(seconds["rljob"]),
            f"{layout}_peak_bytes": ranks.peak_bytes(),
        }


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
    return peak_memory_bytes(os.getpid())


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
    some = f"of {', '.join(LAYOUTS)}, comma-separated"
    parser.add_argument("--layouts", type=names_of(LAYOUTS), default=[*LAYOUTS], help=some)
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
            for layout in options.layouts:
                found |= megatron(layout, size, Path(folder), options.repeats)
        figures |= {f"{name}_{size}": value for name, value in found.items()}
        targets[f"fsdp_ratio_{size}"] = target(found["fsdp_ratio"], ">=", 0.95)
        if size == "46M" and "megatron_dp2" in options.layouts:
            targets["megatron_dp2_ratio_46M"] = target(found["megatron_dp2_ratio"], ">=", 0.9)
    report("trainer", figures, targets, options.keep)


if __name__ == "__main__":
    main()
