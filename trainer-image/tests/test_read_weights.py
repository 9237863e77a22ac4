"""Loading by slices: weights are those of from_pretrained, and a rank reads and holds only what it keeps."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from allocations import Allocations
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from rljob.trainer.backends.fsdp import read_weights
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # configuration, how it is saved
    "tied": ({"model_type": "qwen2", "tie_word_embeddings": True}, {}),
    "sharded bfloat16": ({"model_type": "llama", "tie_word_embeddings": False}, {"dtype": "bfloat16", "size": "20KB"}),
    "one tensor per expert": ({"model_type": "qwen3_moe", **EXPERTS}, {"dtype": "float16"}),
    "one tensor of experts": ({"model_type": "qwen3_moe", **EXPERTS}, {"as_in_memory": True}),
    "sliding window": (
        {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
        {},
    ),
    "split at loading": ({"model_type": "mistral", "sliding_window": None}, {"joined": True}),
    "pickled": ({"model_type": "qwen2", "tie_word_embeddings": True}, {"pickled": True}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory of each family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    made = {}
    for name, (configuration, saved) in FAMILIES.items():
        directory = made[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        config = AutoConfig.for_model(**(COMMON | configuration))
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, saved.get("dtype", "float32")))
        model.save_pretrained(directory, max_shard_size=saved.get("size", "1GB"))
        weights = directory / "model.safetensors"
        if saved.get("as_in_memory"):
            save_file({key: tensor.clone() for key, tensor in model.named_parameters()}, weights)
        if saved.get("joined"):
            tensors = load_file(weights)
            for i in range(2):
                pair = [tensors.pop(f"model.layers.{i}.mlp.{part}_proj.weight") for part in ("gate", "up")]
                tensors[f"model.layers.{i}.mlp.gate_up_proj.weight"] = torch.cat(pair)
            save_file(tensors, weights)
        if saved.get("pickled"):
            torch.save(load_file(weights), directory / "pytorch_model.bin")
            weights.unlink()
    assert (made["sharded bfloat16"] / "model.safetensors.index.json").exists()
    return made


def sharded(source: Path, world: World) -> tuple[Any, Any]:
    model, conversions = read_weights.meta_model(source)
    mesh = init_device_mesh("cpu", (world.size,))
    for module in [module for module in model.modules() if type(module).__name__ in model._no_split_modules]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh), conversions


def split_gate_and_up() -> None:
    """Register a conversion of transformers that needs whole tensors."""
    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    converter = WeightConverter("mlp.gate_up_proj.weight", targets, [Chunk(dim=0)])
    register_checkpoint_conversion_mapping("mistral", [converter])


def check(world: World, directories: dict[str, Path]) -> dict[str, str]:
    """Return a sentence for each family whose model differs from that of from_pretrained, or takes too much memory."""
    from transformers import AutoModelForCausalLM

    split_gate_and_up()
    problems = {}
    for name, source in directories.items():
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        parameters = dict(expected.named_parameters())
        model, conversions = sharded(source, world)
        sizes: list[int] = []
        reader = partial(counted, read_weights.read_rows, sizes)
        with mock.patch.object(read_weights, "read_rows", reader), Allocations("cpu") as memory:
            read_weights.read_weights(model, conversions, source, world)
        problems[name] = compare(model, expected)
        kept = {key: parameter.to_local() for key, parameter in model.named_parameters()}
        of_file = 2 if "dtype" in FAMILIES[name][1] else 4
        rows = sum(local.numel() for local in kept.values()) * of_file
        whole = {key: parameters[key].numel() * of_file for key in kept if "gate_proj" in key or "up_proj" in key}
        if name == "split at loading":
            rows += sum(size - kept[key].numel() * of_file for key, size in whole.items())
        if sum(sizes) != rows:
            problems[name] += f" {sum(sizes)} bytes read where {rows} are needed"
        padded = sum(-(-len(p) // world.size) * p[0].numel() * 4 for p in parameters.values())
        at_once = max(4 * max(sizes), 2 * of_file * max(local.numel() for local in kept.values()))  # of a conversion
        if not padded <= memory.peak <= padded + sum(b.nbytes for b in model.buffers()) * 2 + at_once:
            problems[name] += f" {memory.peak} bytes held where {padded} are kept and {at_once} needed at a time"
    return {name: problem for name, problem in problems.items() if problem}


def counted(read: Any, sizes: list[int], *arguments: Any) -> torch.Tensor:
    tensor = read(*arguments)
    sizes.append(tensor.nbytes)
    return tensor


def compare(model: Any, expected: Any) -> str:
    """Return what differs between the local rows of a model and a whole model."""
    found, other = dict(model.named_parameters()), dict(expected.named_parameters())
    if list(found) != list(other):
        return "other names"
    for key, parameter in found.items():
        local = parameter.to_local()
        if local.dtype != torch.float32 or not torch.equal(
            local, other[key].detach()[read_weights.local_rows(parameter)]
        ):
            return f"{key} differs"
    for (key, buffer), (_, made) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        if buffer.dtype != made.dtype or not torch.equal(buffer, made):
            return f"buffer {key} differs"
    return ""


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_and_buffers_are_those_of_from_pretrained_and_each_rank_reads_only_its_rows(directories, size):
    assert on_ranks(size, check, directories) == [{}] * size


def refused(source: Path, world: World) -> str:
    model, conversions = sharded(source, world)
    with pytest.raises(ModelError) as error:
        read_weights.read_weights(model, conversions, source, world)
    return str(error.value)


def test_weights_that_could_be_loaded_wrong_are_refused_by_name(directories, tmp_path, world):
    config = tmp_path / "config.json"
    weights = tmp_path / "model.safetensors"
    shutil.copytree(directories["tied"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, weights)
    assert "model.embed_tokens.weight and lm_head.weight differ" in refused(tmp_path, world)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, weights)
    model, conversions = sharded(tmp_path, world)
    read_weights.read_weights(model, conversions, tmp_path, world)
    save_file(tensors | {"model.norm.weight": torch.ones(31), "more": torch.ones(2)}, weights)
    assert "mismatched keys (model.norm.weight)" in refused(tmp_path, world)
    save_file(tensors | {"more": torch.ones(2)}, weights)
    assert "unexpected keys (more)" in refused(tmp_path, world)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"is quantized \(quantization_config in config.json\)"):
        sharded(tmp_path, world)
    experts = directories["one tensor per expert"]
    shutil.copytree(experts, tmp_path, dirs_exist_ok=True)
    tensors = load_file(weights)
    save_file({name: tensors[name] for name in tensors if "experts.5.gate_proj" not in name}, weights)
    assert "mismatched keys (model.layers.0.mlp.experts.gate_up_proj" in refused(tmp_path, world)


def test_a_buffer_that_transformers_does_not_compute_is_refused(directories, world, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedModel._init_weights", lambda self, module: None)
    assert "does not compute the buffer model.rotary_emb.inv_freq" in refused(directories["tied"], world)
