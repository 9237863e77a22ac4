"""Packed rows: results, gradients and training are those of padded rows; models that cannot are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch._subclasses import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from training_steps import apply
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.api.roles import Trainer
from rljob.trainer import logprobs
from rljob.trainer.backends.fsdp import packing, row_attention
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.backends.fsdp.output_layer import TargetLogprobs
from rljob.trainer.backends.fsdp.packed_rows import packed, padded
from rljob.trainer.backends.fsdp.row_attention import PACKED, PADDED
from rljob.trainer.batch import Microbatch, Row, collate
from rljob.trainer.errors import ModelError
from rljob.trainer.metrics import METRICS
from rljob.trainer.process_group import World

VOCABULARY, CHUNK = 61, 7
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "llama": {"model_type": "llama"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 4},
    "gemma3 with a window": {"model_type": "gemma3_text", **WINDOW},
    "experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "changed logits": {"model_type": "granite", "logits_scaling": 3.0},
}
PACKABLE = "qwen3"


def make_model(name: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**(COMMON | MODELS.get(name, {}) | changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PADDED).eval()


def made_microbatch() -> Microbatch:
    """Return rows of different lengths and temperatures: one without tokens of the model, one of one token."""
    generator = np.random.default_rng(1)
    rows = []
    for length in (17, 12, 3, 1, 9):
        ids = generator.integers(0, VOCABULARY, length)
        rows.append(Row(ids, np.zeros(length, np.float32), np.arange(length) > 3, np.zeros(length)))
    return collate(rows, [0.7 + 0.2 * i for i in range(len(rows))], torch.device("cpu"))


def results(model: Any, layout: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return log-probabilities and entropies at the model's tokens, and gradients of a sum of them."""
    microbatch = made_microbatch()
    model.config._attn_implementation = PACKED if layout is packed else PADDED
    model.zero_grad()
    output = TargetLogprobs(model, layout)(microbatch, entropy=True)
    kept = [values.where(microbatch.mask_BK, 0.0) for values in (output.logprobs_BK, output.entropy_BK)]
    ((kept[0] - kept[1]) * torch.linspace(0.5, 1.5, kept[0].shape[1])).sum().backward()
    return [values.detach() for values in kept], {name: p.grad.clone() for name, p in model.named_parameters()}


def same(model: Any) -> None:
    """Compare packed and padded rows: within 1e-6 in float64, 1e-5 in float32."""
    error = 1e-6 if model.dtype == torch.float64 else 1e-5
    expected, expected_gradients = results(model, padded)
    found, gradients = results(model, packed)
    torch.testing.assert_close(found, expected, rtol=0, atol=error)
    for name, gradient in gradients.items():
        scale = max(1.0, float(expected_gradients[name].abs().max()))
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=error)


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_results_and_gradients_of_padded_rows(name):
    model = make_model(name)
    same(model if name == "experts" else model.double())  # torch's product of experts has no float64
    with mock.patch.object(logprobs, "CHUNK_BYTES", 4 * VOCABULARY * CHUNK):
        same(model)


def kernel(query: Any, key: Any, value: Any, starts: Any, other_starts: Any, longest: int, other: int, **options: Any):
    """Stand-in for torch's kernel: attention of each row by its definition."""
    assert query.ndim == 3 and starts is other_starts and starts.dtype == torch.int32 and longest == other
    assert options["enable_gqa"] and options["window_size"][1] == 0 and longest == int(starts.diff().max())
    left, outputs = options["window_size"][0], []
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        q_HLD, k_HLD, v_HLD = (part[start:end].transpose(0, 1) for part in (query, key, value))
        k_HLD, v_HLD = (part.repeat_interleave(len(q_HLD) // len(part), 0) for part in (k_HLD, v_HLD))
        scores_HLL = q_HLD @ k_HLD.transpose(1, 2) * options["scale"]
        distance_LL = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen_LL = (distance_LL >= 0) & ((distance_LL <= left) if left >= 0 else True)
        outputs.append((scores_HLL.masked_fill(~seen_LL, -torch.inf).softmax(-1) @ v_HLD).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["qwen2", "gemma3 with a window"])
def test_the_kernel_gets_all_rows_at_once(name, monkeypatch):
    monkeypatch.setattr(row_attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(row_attention, "varlen_attn", mock.Mock(side_effect=kernel))
    same(make_model(name).double())
    assert row_attention.varlen_attn.call_count == COMMON["num_hidden_layers"]


def test_torchs_kernel_takes_these_arguments_in_both_passes():
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes and types only: no GPU is needed
        parts = [torch.empty(10, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
        starts = torch.empty(3, dtype=torch.int32)
        result = varlen_attn(*parts, starts, starts, 6, 6, scale=0.3, window_size=(3, 0), enable_gqa=True)
        assert result.shape == (10, 4, 8) and result.dtype == torch.bfloat16
        result.sum().backward()
        assert [part.grad.shape for part in parts] == [part.shape for part in parts]


OF_PADDING = {"padding_fraction", "lockstep", "memory_peak_bytes"}


def train(world: World, source: Path, job: Any, steps: list[Any]) -> Any:
    backend = FsdpBackend(source, job.spec.trainer, world)
    result = None
    for command, tokens in steps:
        result = apply(world, backend, job.spec.algorithm, command, tokens, job.spec.trainer.microbatch_tokens)
    return {name: tensor.numpy().copy() for name, tensor in backend.named_tensors()}, result.metrics


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {"lora": {"rank": 4}}), (2, {"recompute": "layer"})],
)
def test_training_with_packed_rows_is_that_with_padded_rows(model_directory, job, batch, size, settings):
    common = {"microbatchTokens": 40, "optimizer": {"learningRate": 1e-3, "epsilon": 1e-3}} | settings
    steps = [batch(seed, step=seed) for seed in range(2)]
    expected = on_ranks(size, train, model_directory, job(trainer=common), steps)
    found = on_ranks(size, train, model_directory, job(trainer=common | {"packing": "varlen"}), steps)
    for (weights, metrics), (expected_weights, expected_metrics) in zip(found, expected, strict=True):
        for name, values in weights.items():
            np.testing.assert_allclose(values, expected_weights[name], rtol=0, atol=1e-6)
        assert metrics["padding_fraction"] == 0 < expected_metrics["padding_fraction"]
        for name in METRICS.keys() & metrics.keys() - OF_PADDING:
            if not name.startswith("seconds"):
                assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-6), name


def made_backend(directory: Path, world: World, model: Any, value: str) -> FsdpBackend:
    model.save_pretrained(directory)
    return FsdpBackend(directory, Trainer(dtype="float32", packing=value), world)


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "soft-capping": ({"model_type": "gemma2"}, "its attention needs softcap"),
    "a linear layer": (
        {"model_type": "qwen3_next", "num_experts": 2, "num_experts_per_tok": 1, **LINEAR},
        "it has layers with linear_attention",
    ),
    "own attention": ({"model_type": "stablelm"}, "transformers cannot replace its attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_another_attention_are_refused_by_name(tmp_path, world, name, monkeypatch, caplog):
    changes, reason = REFUSED[name]
    model = make_model("", **changes)
    kind = changes["model_type"]
    with pytest.raises(ModelError, match=rf"spec\.trainer\.packing: \S+ \({kind}\) cannot train packed rows: {reason}"):
        made_backend(tmp_path, world, model, "varlen")
    monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    with caplog.at_level("INFO"):
        assert not made_backend(tmp_path, world, model, "auto").packs
    assert f"rows of microbatches are padded: {reason}" in caplog.text


def mixed(*arguments: Any, **options: Any) -> Any:
    """Attention of all rows as if they were one."""
    options["cu_seq_lens_q"] = options["cu_seq_lens_q"][[0, -1]]
    return row_attention.packed_attention(*arguments, **options)


def test_a_model_or_critic_that_mixes_rows_is_refused(tmp_path, world, monkeypatch):
    backend = made_backend(tmp_path, world, make_model(PACKABLE), "varlen")
    monkeypatch.setattr(packing, "packed_attention", mixed)
    with pytest.raises(ModelError, match=r"its values differ from those of padded rows by 0\.\d+; set none"):
        backend.load_critic(tmp_path, Trainer().optimizer)
    with pytest.raises(ModelError, match=r"its log-probabilities differ from those of padded rows by 0\.\d+; set none"):
        made_backend(tmp_path, world, make_model(PACKABLE), "varlen")


def test_the_default_packs_where_one_kernel_computes_all_rows(tmp_path, world, monkeypatch):
    model = make_model(PACKABLE)
    assert not made_backend(tmp_path, world, model, "auto").packs
    monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    backend = made_backend(tmp_path, world, model, "auto")
    assert backend.packs and backend.model.config._attn_implementation == PACKED
    assert not made_backend(tmp_path, world, model, "none").packs


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "expected"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.bfloat16, 128, (7, 5), False),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
        (torch.bfloat16, 36, (9, 0), False),
    ],
)
def test_the_kernel_needs_a_device_a_type_and_a_size(monkeypatch, dtype, size, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(row_attention, "_runs", lambda *_: True)
    has_kernel = row_attention.has_kernel.__wrapped__  # without its cache
    assert has_kernel(torch.device("cuda"), dtype, size) == expected
    assert not has_kernel(torch.device("cpu"), dtype, size)


@pytest.mark.parametrize("built", [True, False])
def test_the_kernel_is_tried_in_both_passes(monkeypatch, caplog, built):
    def attention(query: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        assert options == {"window_size": (-1, 0)} and query.requires_grad
        if not built:
            raise NotImplementedError("PyTorch was compiled without it")
        return query * 2

    monkeypatch.setattr(row_attention, "varlen_attn", attention)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    with torch.no_grad():
        assert row_attention._runs(torch.device("cpu"), torch.bfloat16, 8) == built
    assert ("PyTorch was compiled without it" in caplog.text) != built
