"""Parts of Megatron-Core's parameters, of a split vocabulary, shims, and refused layouts, without the library."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rljob.api.model_shape import ModelShape, shape_of
from rljob.protocol.environment import ComponentEnvironment
from rljob.trainer import preflight
from rljob.trainer.backends.expert_tensors import by_expert, of_layer
from rljob.trainer.backends.fsdp.read_weights import StoredTensor
from rljob.trainer.backends.megatron import supported_layouts
from rljob.trainer.backends.megatron.context_parallel import natural_order, own_positions
from rljob.trainer.backends.megatron.cpu_shims import megatron_on
from rljob.trainer.backends.megatron.families.dense_decoder import conversion_table
from rljob.trainer.backends.megatron.vocabulary_logprobs import VocabularyPart, split_token_logprobs
from rljob.trainer.backends.megatron.weight_layout import padded, share
from rljob.trainer.logprobs import token_logprobs

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_parts_of_all_ranks_and_stages_are_the_tensors_of_the_file(model_directory, ranks, stages):
    stored = load_file(model_directory / "model.safetensors")
    shape = shape_of(model_directory)
    exported: dict[str, torch.Tensor] = {}
    for stage in range(stages):
        for name, source in conversion_table(shape, stage, stages).items():
            held = []
            for rank in range(ranks):
                pieces = [stored[piece.name][piece.index] for piece in source.pieces(rank, ranks)]
                size = list(torch.cat(pieces, source.dim).shape)
                if "word_embeddings" in name or name == "output_layer.weight":
                    size[0] = padded(shape.vocabulary, ranks) // ranks
                part = torch.full(size, torch.nan)
                source.read(stored.__getitem__, rank, ranks, part)
                held.append(part)
            merged = source.merge(held if source.split else held[:1])
            assert source.split or all(torch.equal(part, held[0]) for part in held)
            assert all(torch.equal(tensor, stored[full]) for full, tensor in merged.items()), name
            if source.exported:
                assert not exported.keys() & merged.keys()
                exported |= merged
    assert exported.keys() == stored.keys()
    if (ranks, stages) == (2, 2):  # group 1: its two heads of the query, its key, its value
        rows = conversion_table(shape, 0, 2)["decoder.layers.0.self_attention.linear_qkv.weight"].pieces(1, 2)
        assert [(piece.name.split(".")[-2], piece.start, piece.stop) for piece in rows] == [
            ("q_proj", 16, 32),
            ("k_proj", 8, 16),
            ("v_proj", 8, 16),
        ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_divided_and_their_parts_are_the_tensors_of_the_file(ranks):
    shape = ModelShape(5, 8, 6, 2, 2, 2, 4, norms_heads=True, experts=4, active_experts=2)
    table = conversion_table(shape, expert_ranks=2)
    stored = {name: torch.randn(size) for source in table.values() for name, size in source.shapes.items()}
    assert sum(tensor.numel() for tensor in stored.values()) == shape.parameters
    for name, source in table.items():
        if "local_experts" in name:
            assert source.expert_rank == (1 if ".local_experts.2." in name or ".local_experts.3." in name else 0)
        else:
            assert source.expert_rank is None
            continue
        held = []
        for rank in range(ranks):
            pieces = [stored[piece.name][piece.index] for piece in source.pieces(rank, ranks)]
            part = torch.full(torch.cat(pieces, source.dim).shape, torch.nan)
            source.read(stored.__getitem__, rank, ranks, part)
            held.append(part)
        assert all(torch.equal(tensor, stored[full]) for full, tensor in source.merge(held).items()), name


def test_a_tensor_of_a_layer_has_the_experts_one_after_the_other():
    """As checkpoints of the FSDP2 backend have them; read from a file, and put together again for that backend."""
    layer, generator = "model.layers.0.mlp.experts", torch.Generator().manual_seed(0)
    both = {
        f"{layer}.gate_up_proj": torch.randn(3, 8, 5, generator=generator),
        f"{layer}.down_proj": torch.randn(3, 5, 4, generator=generator),
    }
    stored = {name: StoredTensor(tensor, tuple(tensor.shape)) for name, tensor in both.items()}
    found = by_expert(stored | {"model.norm.weight": StoredTensor(torch.ones(5), (5,))})
    assert len(found) == 10 and found[f"{layer}.2.up_proj.weight"].shape == (4, 5)
    up = both[f"{layer}.gate_up_proj"][2, 4:]
    assert torch.equal(found[f"{layer}.2.up_proj.weight"].content[(slice(1, 3),)], up[1:3])
    down = found[f"{layer}.1.down_proj.weight"].content[(slice(None), slice(2, 4))]
    assert torch.equal(down, both[f"{layer}.down_proj"][1][:, 2:4])
    for name, tensor in both.items():
        again = of_layer(name, range(1, 3), lambda each: found[each].content[(slice(None),)])
        assert torch.equal(again, tensor[1:3])


def test_groups_of_layers_alternate_between_stages(model_directory):
    shape = replace(shape_of(model_directory), layers=8)
    layers = [
        sorted({int(name.split(".")[2]) for name in conversion_table(shape, stage, 2, 2) if "layers" in name})
        for stage in range(2)
    ]
    assert layers == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert not [name for name in conversion_table(shape, 1, 2, 2) if name.startswith("embedding")]


def test_parts_of_rows_on_all_ranks_are_the_rows_and_see_equally_many_tokens():
    for ranks in (1, 2, 3):
        parts = [own_positions(12 * ranks, rank, ranks) for rank in range(ranks)]
        gathered = torch.from_numpy(np.concatenate(parts))
        assert natural_order(gathered.unsqueeze(-1), ranks).flatten().tolist() == list(range(12 * ranks))
        assert len({int(part.sum()) for part in parts}) == 1


class Meeting:
    """Exchanges tensors between threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._values: list[torch.Tensor] = []

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        if self._barrier.wait() == 0:
            self._values = []
        self._barrier.wait()
        self._values.append(values)
        self._barrier.wait()
        result = torch.stack(self._values)
        self._barrier.wait()
        return result


class Threads(VocabularyPart):
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.stacked(values).sum(0)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.stacked(values).amax(0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_of_a_split_vocabulary_are_those_of_the_whole_one(ranks, entropy):
    """Trap: padded columns are counted. With 5 token ids on 4 ranks the last rank has only padding."""
    generator = torch.Generator().manual_seed(3)
    vocabulary = 5
    logits = (3 * torch.randn(2, 7, vocabulary, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocabulary, (2, 7), generator=generator)
    temperature, weights = torch.tensor([0.7, 1.6]), torch.randn(2, 7, 1 + entropy, generator=generator)
    expected = token_logprobs(logits, targets, temperature, entropy=entropy)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)

    meeting, results = Meeting(ranks), {}
    width = padded(vocabulary, ranks) // ranks

    def work(rank: int) -> None:
        first, last = share(vocabulary, rank, ranks)
        own = torch.full((2, 7, width), 50.0)  # padding: large, so that counting it is seen
        own[..., : last - first] = logits.detach()[..., first:last]
        own.requires_grad_()
        part = Threads(first, last - first, meeting)
        given = split_token_logprobs(own, targets, temperature, part, chunk=3, entropy=entropy)
        (gradient,) = torch.autograd.grad((given * weights).sum(), own)
        assert not gradient[..., last - first :].any()
        results[rank] = given.detach(), gradient[..., : last - first]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == ranks
    for given, _ in results.values():
        torch.testing.assert_close(given, expected.detach(), rtol=0, atol=2e-6)
    gradient = torch.cat([results[rank][1] for rank in range(ranks)], -1)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=2e-6)


def test_the_device_cuda_is_the_cpu_inside_the_shims_only():
    current = torch.cuda.current_device
    with megatron_on(CPU):
        made = [torch.zeros(1, device="cuda"), torch.tensor([1.0], device="cuda"), torch.ones(1).cuda()]
        made.append(torch.empty(1, device=torch.cuda.current_device()))
        assert all(tensor.device == CPU for tensor in made)
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        torch.cuda.synchronize()
    assert torch.cuda.current_device is current and torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def edited(model: Path, into: Path, **values: Any) -> Path:
    """Return a copy of a model's configuration with changes."""
    into.mkdir()
    shutil.copy(model / "config.json", into)
    path = into / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return into


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "parallelism", "sentence"),
    [
        ({}, {"tensor": 2, "pipeline": 2}, None),
        ({}, {"tensor": 4}, "spec.trainer.parallelism.tensor: 4 does not divide the 2 heads of key and value"),
        ({"num_key_value_heads": 4, "intermediate_size": 46}, {"tensor": 4}, "4 does not divide the 46 elements of"),
        ({"num_hidden_layers": 4}, {"pipeline": 2, "virtual_pipeline": 2}, None),
        ({}, {"pipeline": 2, "virtual_pipeline": 2}, "virtualPipeline: pipeline 2 × 2 does not divide the 2 layers"),
        (EXPERTS, {"expert": 2, "tensor": 2}, None),
        (EXPERTS, {"expert": 4}, "spec.trainer.parallelism.expert: 4 does not divide the 6 experts of a layer; set a"),
        (EXPERTS | {"mlp_only_layers": [0]}, {}, "does not support a value for mlp_only_layers of config.json"),
        ({}, {"expert": 2}, "spec.trainer.parallelism.expert: the model has no experts; remove it"),
        ({}, {"pipeline": 4}, "spec.trainer.parallelism.pipeline: 4 does not divide the 2 layers of the model"),
        ({"model_type": "gemma3_text"}, {}, "models of type qwen2, qwen3, llama, qwen3_moe, not gemma3_text"),
        ({"use_sliding_window": True}, {}, "megatron does not support True for use_sliding_window of config.json"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, "megatron does not support yarn for rope_type"),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            *({}, "megatron does not support yarn for rope_type"),
        ),
        (
            {"num_attention_heads": 5},
            {},
            "num_key_value_heads of config.json that divides the 5 attention heads, not 2",
        ),
        (EXPERTS | {"num_experts_per_tok": 7}, {}, "cannot choose 7 (num_experts_per_tok of config.json) of 6 experts"),
        ({"partial_rotary_factor": 0.5}, {}, "does not support a value for partial_rotary_factor of config.json"),
        (EXPERTS | {"num_experts_per_tok": None}, {}, "config.json lacks one; save the model again with transformers"),
        (
            EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": True},
            *({}, "does not support norm_topk_prob of config.json with one expert for each token; set fsdp"),
        ),
        ({"attention_bias": True}, {}, "megatron does not support True for attention_bias of config.json; set fsdp"),
        ({"hidden_act": "gelu"}, {}, "megatron does not support gelu for hidden_act of config.json; set fsdp"),
        ({"quantization_config": {"bits": 4}}, {}, "megatron does not support a value for quantization_config"),
    ],
)
def test_models_and_layouts_that_would_be_wrong_are_refused_by_name(
    model_directory, job, tmp_path, changes, parallelism, sentence
):
    source = edited(model_directory, tmp_path / "model", **changes)
    settings = job(trainer={"backend": "megatron", "processesPerNode": 4, "parallelism": parallelism}).spec.trainer
    found = list(supported_layouts.problems(source, settings))
    assert (found == []) if sentence is None else (len(found) == 1 and sentence in found[0])


def test_the_check_before_a_start_reports_a_layout_and_a_missing_library(model_directory, job, monkeypatch):
    made = job(trainer={"backend": "megatron", "processesPerNode": 4, "parallelism": {"tensor": 4}})
    (problem,) = preflight.check(ComponentEnvironment(made, Path("/nowhere"), "", "", "", "", ""))
    assert problem.startswith("spec.trainer.parallelism.tensor: 4 does not divide")
    monkeypatch.setattr(supported_layouts.importlib.util, "find_spec", lambda name: None)
    (missing,) = preflight.reference_problems(made.spec)
    assert missing.startswith("spec.trainer.backend: megatron needs Megatron-Core; install rljob-trainer[megatron]")
