"""The estimated memory of the Megatron backend, and that the recipes fit their GPUs by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rljob.api.load import load
from rljob.api.megatron_memory import (
    MegatronLayout,
    describe_estimate,
    estimate,
    estimate_of,
    stage_parameters,
)
from rljob.api.memory_plan import USABLE
from rljob.api.model_shape import read_shape
from rljob.api.resolve import resolve
from rljob.api.roles import TrainerParallelism

RECIPES = sorted((Path(__file__).parents[2] / "examples/recipes").glob("q*.yaml"))
GIB = 1 << 30
QWEN2_7B = {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944}
QWEN2_7B |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN3_30B = {"model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "moe_intermediate_size": 768}
QWEN3_30B |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
QWEN3_30B |= {"num_experts": 128, "num_experts_per_tok": 8}
PUBLISHED = {"Qwen2.5-7B": (QWEN2_7B, 7_615_616_512), "Qwen3-30B-A3B-Base": (QWEN3_30B, 30_532_122_624)}
"""Name on the Hub → its config.json, and the number of parameters that the model card states."""


def shape(name):
    found = read_shape(PUBLISHED[name][0])
    assert found is not None
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_of_published_models_give_their_parameters(name):
    model = shape(name)
    assert model.parameters == PUBLISHED[name][1]
    assert sum(stage_parameters(model, TrainerParallelism())) == model.parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_ranks_hold_the_model_once(name):
    """What each rank holds whole (norms, routers) and a second end of the model are all that is added."""
    model = shape(name)
    for sizes in ({"tensor": 4}, {"pipeline": 4}, {"tensor": 2, "pipeline": 2}):
        parallelism = TrainerParallelism(**sizes)
        dense, experts = stage_parameters(model, parallelism)
        ranks = parallelism.tensor * parallelism.pipeline
        assert model.parameters <= ranks * (dense + experts) <= 1.3 * model.parameters
    if model.experts:
        _, all_experts = stage_parameters(model, TrainerParallelism())
        assert stage_parameters(model, TrainerParallelism(expert=8))[1] * 8 == all_experts


def test_each_parallelism_lowers_what_it_divides():
    model = shape("Qwen3-30B-A3B-Base")
    base = MegatronLayout(TrainerParallelism(), 8, "bfloat16", 16_384)
    peaks = {
        name: estimate(model, replace(base, parallelism=TrainerParallelism(**{name: 4})))
        for name in ("tensor", "pipeline", "context", "expert")
    }
    before = estimate(model, base)
    for name in ("tensor", "pipeline", "expert"):
        assert peaks[name].state < before.state, name
    for name in ("tensor", "context"):
        assert peaks[name].activations < before.activations and peaks[name].output < before.output, name
    assert peaks["context"].state == before.state
    recomputed = estimate(model, replace(base, recompute="layer"))
    assert recomputed.activations < before.activations / 8 and recomputed.state == before.state
    assert estimate(model, replace(base, frozen=(model,))).frozen == 2 * model.parameters


def test_a_rank_keeps_its_weights_and_gradients_and_its_shard_of_the_optimizer():
    """bfloat16: 2 bytes of weight, 4 of gradient; of float32 weights and two moments, 12, what the replicas divide."""
    dense = shape("Qwen2.5-7B")
    assert estimate(dense, MegatronLayout(TrainerParallelism(), 8, "bfloat16", 1024)).state == 6 * dense.parameters + (
        12 * dense.parameters // 8
    )
    model, parallelism = shape("Qwen3-30B-A3B-Base"), TrainerParallelism(pipeline=2, expert=4)
    outside, experts = stage_parameters(model, parallelism)
    assert experts == 24 * 32 * 3 * 2048 * 768  # layers and experts of a rank, and three matrices
    # 16 processes: 8 replicas of what is outside of experts, and 2 of each expert.
    state = estimate(model, MegatronLayout(parallelism, 16, "bfloat16", 1024)).state
    assert state == 6 * (outside + experts) + 12 * outside // 8 + 12 * experts // 2
    assert estimate(model, MegatronLayout(parallelism, 16, "float32", 1024)).state == 8 * (outside + experts) + (
        8 * outside // 8 + 8 * experts // 2
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus_by_the_estimate(path):
    spec = resolve(load(path, [])).spec
    name = spec.models[0].source.rpartition("/")[2]
    peak = estimate_of(spec, {"policy": shape(name)})
    assert peak.device <= USABLE * 80e9, f"{peak.device / GIB:.1f} GiB"
    gpus = spec.trainer.processes + sum(pool.replicas.min * pool.parallelism.workers for pool in spec.rollouts)
    assert 8 <= gpus <= 64


def test_the_estimate_of_a_job_is_shown_with_its_parts():
    path = next(path for path in RECIPES if "math-8gpu" in path.name)
    job, models = resolve(load(path, [])), {"policy": shape("Qwen2.5-7B")}
    first, *parts = describe_estimate(job.spec, models)
    assert "estimate: 7,615,616,512 parameters, 4 processes, bfloat16, microbatches of up to 16384 tokens: GPU" in first
    assert [part.partition(":")[0].strip() for part in parts] == [
        *("weights, gradients and optimizer", "forward passes", "output layer")
    ]
    assert not describe_estimate(job.spec, {})
    with_critic = resolve(load(path, ["spec.algorithm={preset: ppo}"])).spec
    critic, policy = estimate_of(with_critic, models).critic, estimate_of(with_critic, models).state
    assert 0.9 < critic / policy < 1.1
