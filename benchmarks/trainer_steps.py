"""Optimizer steps that the benchmark of the trainer measures: rljob's, and those of a bare loop over the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.api.models import LogprobTolerance
from rljob.api.roles import Trainer
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.backends.base import Backend
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Row, lay_out
from rljob.trainer.process_group import World
from rljob.trainer.step import apply_batch, plan_step
from rljob.trainer.step_checks import StepChecks

SEED, GROUP = 5, 8
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


def fsdp_step(size: str, model: Path, world: World) -> Step:
    """Return one step of rljob's trainer with FSDP2 on one rank."""
    return trainer_step(size, FsdpBackend(model, Trainer(dtype="float32"), world))


def trainer_step(size: str, backend: Backend) -> Step:
    """Return one step of rljob's trainer; all ranks make it together."""
    train, rows = make_batch(size)
    checks = StepChecks(LogprobTolerance(1e-4, 1e-4, "", ""))  # no sample is of the current version

    def step() -> None:
        plan = plan_step(train, ALGORITHM, backend.world, SIZES[size][2])
        own = {i: rows[i] for i in plan.indices}
        apply_batch(plan, own, ALGORITHM, backend, backend.world, checks)

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


PROGRAMS: Mapping[str, Callable[[str, Path, World], Step]] = {"rljob": fsdp_step, "bare": bare_step}
