"""The memory plan is compared with the bytes of the tensors that the FSDP2 backend holds: load, step, update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_bytes import HeldBytes
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.api.extensions import BACKENDS, load
from rljob.api.memory_checks import UNKNOWN_TOKENS, microbatch_tokens
from rljob.api.memory_plan import (
    CHUNK_BYTES,
    EXCESS,
    EXCHANGE_BYTES,
    ONE_EXCHANGE_BYTES,
    PACKED_EXCESS,
    PADDED_LIMIT,
    AdapterSettings,
    Packing,
    TrainerSettings,
    plan_memory,
)
from rljob.api.model_shape import shape_of
from rljob.api.roles import Trainer
from rljob.trainer import batch_plan, logprobs, microbatch_budget
from rljob.trainer.backends.fsdp import backend as fsdp_backend
from rljob.trainer.backends.fsdp import gather_weights
from rljob.trainer.batch import Microbatch, Row, collate
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World, join_world, leave_world
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.wire_plan import WirePlan

ROWS, LENGTH = 4, 96
BUCKET = 1 << 16  # of weights on the wire


@pytest.fixture
def world() -> Any:
    yield join_world()
    leave_world()


def save_model(directory: Path, vocabulary: int, kind: str) -> None:
    config = AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@pytest.mark.parametrize(
    ("kind", "vocabulary", "dtype", "recompute", "lora", "packing"),
    [
        ("qwen2", 1500, "float32", "none", None, "none"),
        ("qwen2", 1500, "bfloat16", "none", None, "none"),
        ("qwen2", 64, "bfloat16", "none", None, "none"),
        ("qwen3", 64, "float32", "none", None, "none"),
        ("qwen2", 64, "bfloat16", "layer", None, "none"),
        ("qwen2", 1500, "float32", "none", {"rank": 8}, "none"),
        ("qwen2", 64, "bfloat16", "none", {"rank": 64}, "none"),
        ("qwen2", 1500, "bfloat16", "layer", {"rank": 64}, "none"),
        ("qwen3", 64, "bfloat16", "none", {"rank": 32, "targets": ["q_proj", "mlp.down_proj"]}, "none"),
        ("qwen3", 64, "float32", "none", None, "varlen"),
        ("qwen2", 1500, "bfloat16", "none", None, "varlen"),
        ("qwen2", 64, "float32", "layer", {"rank": 8}, "varlen"),
    ],
)
def test_load_step_and_update_hold_as_many_bytes_as_planned(
    tmp_path, world, kind, vocabulary, dtype, recompute, lora, packing
):
    torch.manual_seed(0)
    save_model(tmp_path, vocabulary, kind)
    settings = Trainer.model_validate({"dtype": dtype, "recompute": recompute, "lora": lora, "packing": packing})
    factory = load(BACKENDS, "fsdp", "backend")
    loading, stepping, sending = HeldBytes(), HeldBytes(), HeldBytes()
    with loading:
        backend = factory(tmp_path, settings, world)
    microbatch = packed_rows(vocabulary) if packing == "varlen" else padded_rows(vocabulary)

    def step() -> None:
        backend.run([microbatch, microbatch], lambda _, output: output.logprobs_BK.sum())
        backend.update(0)

    step()  # makes the moments
    for held in (stepping, sending):
        states = backend._optimizer.state.values()
        moments = [[value for value in state.values() if value.dim()] for state in states]  # no counts of updates
        held.add(list(backend._parameters.values()), moments)
    with stepping:
        step()
    wires = PackedWeights(WirePlan.of(backend.named_tensors(backend.dtype), BUCKET))
    with sending:
        wires.fill(backend.named_tensors(backend.dtype), BucketBuffers())
        wires.digest()
    model = shape_of(tmp_path)
    assert model is not None
    adapters = AdapterSettings(lora["rank"], tuple(lora["targets"]) if "targets" in lora else None) if lora else None
    trained = sum(parameter.numel() for parameter in backend.model.parameters() if parameter.requires_grad)
    assert trained == (model.layers * adapters.block_parameters(model) if adapters else model.parameters)
    kernel: Packing = "none" if packing == "none" else "rows"
    numbers = TrainerSettings(1, dtype, sum(microbatch.lengths), recompute, adapters=adapters, packing=kernel)
    plan = plan_memory(model, numbers)
    most = EXCESS[recompute] + (PACKED_EXCESS if packing == "varlen" else 0.0)  # what the loss pads counts more here
    assert stepping.peak <= plan.step.device <= most * stepping.peak, plan.step.device / stepping.peak
    # without the copy of a checkpoint that is written in the background
    saved = 4 * model.parameters + 4 * trained * (3 if adapters else 2)
    update = plan.update.device + plan.update.host - saved
    assert sending.peak <= update <= 1.25 * sending.peak, update / sending.peak
    loaded = plan.load.device + plan.load.host
    assert loading.peak <= loaded <= (2 if packing == "varlen" else 1.3) * loading.peak, loaded / loading.peak


def padded_rows(vocabulary: int) -> Microbatch:
    """Return rows of one length."""
    ids_BL = torch.randint(0, vocabulary, (ROWS, LENGTH))
    return Microbatch(
        token_ids_BL=ids_BL,
        keep_K=torch.arange(LENGTH - 1),
        targets_BK=ids_BL[:, 1:],
        mask_BK=torch.ones(ROWS, LENGTH - 1, dtype=torch.bool),
        behavior_BK=torch.zeros(ROWS, LENGTH - 1),
        temperature_B=torch.ones(ROWS),
        first=1,
        lengths=[LENGTH] * ROWS,
    )


def packed_rows(vocabulary: int) -> Microbatch:
    """Return a long row and short ones: nearly PADDED_LIMIT times as many padded positions as tokens."""
    rows = []
    for length in [2 * LENGTH] + [LENGTH // 6] * 9:
        ids = torch.randint(0, vocabulary, (length,)).numpy()
        rows.append(Row(ids, np.zeros(length, np.float32), np.arange(length) > 0, np.zeros(length)))
    return collate(rows, [1.0] * len(rows), torch.device("cpu"))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1500, "float32"), (64, "bfloat16")])
def test_a_critic_holds_as_many_bytes_as_planned(tmp_path, world, vocabulary, dtype):
    torch.manual_seed(0)
    save_model(tmp_path, vocabulary, "qwen2")
    settings = Trainer.model_validate({"dtype": dtype})
    critic = load(BACKENDS, "fsdp", "backend")(tmp_path, settings, world).load_critic(tmp_path, settings.optimizer)
    microbatch = padded_rows(vocabulary)

    def step() -> None:
        critic.run([microbatch, microbatch], lambda _, values_BK: values_BK.square().sum())
        critic.update(0)

    step()  # makes the moments
    held = HeldBytes()
    optimizer = critic.network._optimizer
    moments = [[value for value in state.values() if value.dim()] for state in optimizer.state.values()]
    held.add(list(critic.network._parameters.values()), moments)
    with held:
        step()
    shape = shape_of(tmp_path)
    assert shape is not None
    model = replace(shape, values=True)
    assert model.parameters == sum(parameter.numel() for parameter in critic.network.model.parameters())
    planned = plan_memory(model, TrainerSettings(1, dtype, ROWS * LENGTH)).step.device
    assert held.peak <= planned <= EXCESS["none"] * held.peak, planned / held.peak


def test_the_sizes_of_the_plan_are_those_of_the_trainer():
    assert logprobs.CHUNK_BYTES == CHUNK_BYTES
    assert fsdp_backend.ONE_EXCHANGE_BYTES == ONE_EXCHANGE_BYTES
    assert gather_weights.BUCKET_BYTES == EXCHANGE_BYTES
    assert batch_plan.PADDED_LIMIT == PADDED_LIMIT


def test_the_budget_follows_from_the_smallest_gpu(job, model_directory, world, monkeypatch, caplog):
    on_gpu = job(trainer={"accelerator": {"kind": "nvidia"}}).spec
    memory = 64 << 20

    def gathered(self: World, value: int) -> list[int]:
        assert value == 0  # this machine has no GPU
        return [memory, 2 * memory]

    monkeypatch.setattr(World, "gather", gathered)
    model, sources = shape_of(model_directory), {"policy": model_directory}
    assert model is not None
    models = {"policy": model}
    with caplog.at_level("INFO"):
        tokens = microbatch_budget.microbatch_budget(on_gpu, sources, world)
    assert tokens == microbatch_tokens(on_gpu, models, memory)
    assert 256 < tokens < microbatch_tokens(on_gpu, models, 2 * memory)
    assert f"microbatches of {tokens} tokens (from the memory of the GPUs)" in caplog.text
    own = job(trainer={"accelerator": {"kind": "nvidia"}, "backend": "acme.trainer:Backend"}).spec
    with caplog.at_level("INFO"):
        assert microbatch_budget.microbatch_budget(own, sources, world) == UNKNOWN_TOKENS
    assert f"{UNKNOWN_TOKENS} tokens (the memory that acme.trainer:Backend needs is not known)" in caplog.text
    memory = 1 << 20
    with pytest.raises(ModelError, match=r"spec\.\S+: .* needs .* on a GPU"):
        microbatch_budget.microbatch_budget(on_gpu, sources, world)
    monkeypatch.undo()
    with caplog.at_level("INFO"):
        assert microbatch_budget.microbatch_budget(on_gpu, sources, world) == UNKNOWN_TOKENS
    assert f"{UNKNOWN_TOKENS} tokens (the memory of the device is not known)" in caplog.text
    nine = job(trainer={"microbatchTokens": 9}).spec
    assert microbatch_budget.microbatch_budget(nine, sources, world) == 9
