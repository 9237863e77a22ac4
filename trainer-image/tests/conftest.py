"""A tiny model, batches for it, and a world of one rank."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in processes that tests start

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.protocol.messages import BatchSample, SampleTokens, Train, VersionSpan
from rljob.trainer.world import World, join_world, leave_world, make_deterministic

VOCABULARY = 61


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of a Qwen2 with 2 layers, hidden 32, tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def make_job(source: Path, **spec: object) -> RLJob:
    """Return a resolved job; ``spec`` replaces or adds entries of the manifest's spec."""
    manifest = {
        "metadata": {"name": "tiny"},
        "spec": {
            "models": [{"name": "policy", "source": str(source)}],
            "training": {"steps": 4, "promptsPerStep": 3, "samplesPerPrompt": 2},
            "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"}],
            "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
            "rollouts": [{"name": "main", "maxModelLength": 512}],
            "trainer": {"optimizer": {"learningRate": 1e-3, "maxGradNorm": 0.5}},
            **spec,
        },
    }
    return resolve(RLJob.model_validate(manifest))


@pytest.fixture
def job(model_directory: Path) -> Callable[..., RLJob]:
    """Maker of jobs, see :func:`make_job`."""
    return lambda **spec: make_job(model_directory, **spec)


def make_batch(
    seed: int = 0, groups: int = 4, members: int = 3, step: int = 0, temperature: float = 0.8
) -> tuple[Train, list[SampleTokens]]:
    """Return a batch of random sequences whose engine log-probabilities are noise."""
    generator = np.random.default_rng(seed)
    scalars, tokens = [], []
    for group in range(groups):
        prompt = generator.integers(0, VOCABULARY, generator.integers(2, 9))
        for member in range(members):
            response = generator.integers(0, VOCABULARY, generator.integers(1, 14))
            ids = np.concatenate([prompt, response]).astype("<i4")
            mask = np.arange(len(ids)) >= len(prompt)
            logprobs = np.where(mask, -4.0 + 0.4 * generator.standard_normal(len(ids)), 0).astype("<f4")
            name = f"g{group}.{member}"
            scalars.append(
                BatchSample(
                    sample=name,
                    group=f"g{group}",
                    reward=float(generator.integers(0, 2)),
                    prompt_tokens=len(prompt),
                    response_tokens=len(response),
                    min_version=0,
                    temperature=temperature,
                    max_tokens=16,
                )
            )
            tokens.append(
                SampleTokens(
                    name,
                    ids.tobytes(),
                    logprobs.tobytes(),
                    mask.astype(np.uint8).tobytes(),
                    [VersionSpan(0, 0, len(ids))],
                )
            )
    return Train(incarnation=1, step=step, samples=scalars, first_of_run=False), tokens


@pytest.fixture
def batch() -> Callable[..., tuple[Train, list[SampleTokens]]]:
    """Maker of batches, see :func:`make_batch`."""
    return make_batch


@pytest.fixture
def world() -> Iterator[World]:
    """A world of this process alone."""
    torch.set_num_threads(1)
    alone = join_world()
    make_deterministic(alone.device)
    yield alone
    leave_world()
    torch.use_deterministic_algorithms(False)
