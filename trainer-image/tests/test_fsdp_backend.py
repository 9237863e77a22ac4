"""The FSDP2 backend: output layer in chunks, recomputation by layer, whole weights gathered by bucket."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from allocations import Allocations, saved_bytes
from ranks import on_ranks
from torch.distributed.tensor.debug import CommDebugMode
from training_steps import whole_gradients
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.api.roles import Trainer
from rljob.trainer import logprobs
from rljob.trainer.backends.fsdp import backend as backend_module
from rljob.trainer.backends.fsdp import gather_weights
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.backends.fsdp.output_layer import TargetLogprobs
from rljob.trainer.batch import Microbatch, Row, collate
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

VOCABULARY, HIDDEN = 2048, 16
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
IN_CHUNKS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "untied": {"model_type": "llama", "tie_word_embeddings": False},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "scaled embeddings": {"model_type": "gemma3_text"},
}
CHANGED_LOGITS: dict[str, dict[str, Any]] = {
    "soft-capping": {"model_type": "gemma2", "final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
    "division": {"model_type": "granite", "logits_scaling": 3.0},
    "factor": {"model_type": "cohere", "logit_scale": 0.3},
}
CHUNK = 16  # positions


def make_model(configuration: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**(COMMON | configuration))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def made_microbatch(rows: int = 4, length: int = 40) -> Microbatch:
    """Return rows of random tokens with different temperatures; the last row is shorter."""
    generator = np.random.default_rng(1)
    made = []
    for i in range(rows):
        ids = generator.integers(0, 61, length - 7 * (i == rows - 1))
        made.append(Row(ids, np.zeros(len(ids), np.float32), np.arange(len(ids)) > 2, np.zeros(len(ids))))
    return collate(made, [0.7 + 0.3 * i for i in range(rows)], torch.device("cpu"))


def in_small_chunks() -> Any:
    return mock.patch.object(logprobs, "CHUNK_BYTES", 4 * VOCABULARY * CHUNK)


def results(model: Any, compute: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probabilities minus entropies at the model's tokens and the gradients of a sum of them."""
    microbatch = made_microbatch()
    model.zero_grad()
    output = compute(microbatch, entropy=True)
    values_BK = (output.logprobs_BK - output.entropy_BK).where(microbatch.mask_BK, 0.0)
    (values_BK * torch.linspace(0.5, 1.5, values_BK.shape[1])).sum().backward()
    return values_BK.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*IN_CHUNKS, *CHANGED_LOGITS])
def test_the_log_probabilities_of_any_output_layer_are_those_of_all_logits(family):
    model = make_model((IN_CHUNKS | CHANGED_LOGITS)[family])
    fused, plain = TargetLogprobs(model), TargetLogprobs(model)
    plain._layer = None
    expected, expected_gradients = results(model, plain)
    with in_small_chunks():
        found, gradients = results(model, fused)
    assert (fused._layer is None) == (family in CHANGED_LOGITS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(expected_gradients[name].abs().max()))
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=1e-6)


def largest_tensor(compute: Any, model: Any) -> int:
    with Allocations("cpu") as memory:
        results(model, compute)
    return memory.largest


def test_the_logits_of_all_positions_are_never_in_memory():
    model = make_model(IN_CHUNKS["untied"])
    plain = TargetLogprobs(model)
    plain._layer = None
    positions = made_microbatch().mask_BK.numel()
    with in_small_chunks():
        assert largest_tensor(plain, model) == 4 * VOCABULARY * positions
        assert largest_tensor(TargetLogprobs(model), model) == 4 * VOCABULARY * CHUNK
    assert positions > 8 * CHUNK == 8 * HIDDEN  # a chunk is as large as the weight


def trained(source: Path, world: World, **settings: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return log-probabilities, gradients, and the bytes saved for the backward pass."""
    backend = FsdpBackend(source, Trainer.model_validate({"dtype": "float32"} | settings), world)
    with saved_bytes() as saved:
        (output,) = backend.run([made_microbatch()], lambda _, output: output.logprobs_BK.sum())
    return output.logprobs_BK, whole_gradients(backend), sum(saved)


@pytest.mark.parametrize("family", ["tied", "experts", "scaled embeddings"])
def test_recomputed_layers_give_the_same_gradient_from_less_memory(tmp_path, world, family):
    make_model(IN_CHUNKS[family] | {"vocab_size": 61}).save_pretrained(tmp_path)
    expected, expected_gradients, kept = trained(tmp_path, world)
    found, gradients, inputs = trained(tmp_path, world, recompute="layer")
    assert torch.equal(found, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-6)
    assert inputs < kept / 2


def test_recomputation_of_a_model_without_named_layers_is_refused(model_directory, world, monkeypatch):
    monkeypatch.setattr("transformers.Qwen2PreTrainedModel._no_split_modules", [])
    with pytest.raises(ModelError, match=r"names no layers of this model; set spec\.trainer\.recompute to none"):
        trained(model_directory, world, recompute="layer")


def gathered(world: World, source: Path) -> list[str]:
    """Return the problems of whole tensors that are gathered in small buckets."""
    backend = FsdpBackend(source, Trainer(dtype="float32"), world)
    parameters = backend._parameters
    problems = []
    for dtype, limit in ((torch.float32, 1 << 28), (torch.bfloat16, 6000), (torch.bfloat16, 1)):
        original = torch.distributed.all_gather_into_tensor
        counted = mock.patch.object(gather_weights.dist, "all_gather_into_tensor", wraps=original)
        with counted as calls, CommDebugMode() as all_calls:
            whole = {name: t.clone() for name, t in gather_weights.whole_tensors(parameters, dtype, limit)}
        if all_calls.get_total_counts() != (calls.call_count if world.size > 1 else 0):
            problems.append(f"collectives beside those of the buckets: {dict(all_calls.get_comm_counts())}")
        if list(whole) != [name for name, _ in backend.named_tensors()]:
            problems.append("other names")
        for name, tensor in whole.items():
            expected = parameters[name].detach().full_tensor().to(dtype)
            if tensor.dtype != dtype or tensor.shape != expected.shape or not torch.equal(tensor, expected):
                problems.append(f"{name} differs in {dtype}")
        sent = sum(call.args[1].nbytes for call in calls.call_args_list)
        rows = sum(-(-len(p) // world.size) * math.prod(p.shape[1:]) for p in parameters.values())
        if world.size > 1 and sent != rows * dtype.itemsize:
            problems.append(f"{sent} bytes sent of {rows} numbers in {dtype}")
        expected_calls = {1 << 28: 1, 1: len(parameters)}.get(limit)
        if world.size > 1 and expected_calls not in (None, calls.call_count):
            problems.append(f"{calls.call_count} collectives where {expected_calls} are needed")
    return problems


@pytest.mark.parametrize("size", [1, 4])
def test_whole_weights_are_gathered_by_bucket_in_the_type_of_the_wire(model_directory, size):
    assert on_ranks(size, gathered, model_directory) == [[]] * size


def differences(world: World, source: Path) -> list[str]:
    """Return the gradients of sharded models with soft-capping that differ from those of a whole model."""
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    _, expected = results(whole, TargetLogprobs(whole))
    problems = []
    for limit in (0, 1 << 30):
        with mock.patch.object(backend_module, "ONE_EXCHANGE_BYTES", limit):
            backend = FsdpBackend(source, Trainer(dtype="float32"), world)
        weights_K = torch.linspace(0.5, 1.5, made_microbatch().mask_BK.shape[1])
        half = made_microbatch().mask_BK / (2 * world.size)  # two microbatches on each rank

        def loss(_: int, output: Any, half: torch.Tensor = half, weights_K: torch.Tensor = weights_K) -> torch.Tensor:
            return ((output.logprobs_BK - output.entropy_BK) * half * weights_K).sum()

        backend.run([made_microbatch()] * 2, loss, entropy=True)
        for name, gradient in whole_gradients(backend).items():
            if not torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-5):
                problems.append(f"{name} {limit} {(gradient - expected[name]).abs().max()}")
    return problems


def test_a_sharded_model_that_changes_its_logits_has_the_gradient_of_a_whole_one(tmp_path):
    make_model(CHANGED_LOGITS["soft-capping"] | {"vocab_size": 61}).save_pretrained(tmp_path)
    assert on_ranks(2, differences, tmp_path) == [[], []]
