"""LoRA: gradients against plain transformers, frozen weights, merged weights, resume, ranks."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file
from test_ranks import OPTIMIZER_SETTINGS, compare, resume, save, train
from torch.nn.utils import parametrize
from training_steps import whole_gradients
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.api.roles import Trainer
from rljob.trainer.backends.base import Output
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Microbatch, Row, collate
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

LORA = {"rank": 4, "alpha": 6.0}
LAYERS = [
    f"model.layers.{i}.{name}"
    for i in (0, 1)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]


def made_backend(source: Path, world: World, **settings: Any) -> FsdpBackend:
    """Return a backend whose B are random, so that A has a gradient."""
    backend = FsdpBackend(source, Trainer.model_validate({"dtype": "float32", "lora": LORA} | settings), world)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, local in backend._optimizer.local.items():
            if name.endswith("lora_B"):
                local.copy_(torch.randn(local.shape, generator=generator) / 4)
    return backend


def microbatch() -> Microbatch:
    ids = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1)).numpy()
    rows = [Row(row, row * 0.0, row >= 0, row * 0.0) for row in ids]
    for row in rows:
        row.mask_L[:2] = False
    return collate(rows, [0.7, 1.0, 1.3], torch.device("cpu"))


def loss(_: int, output: Output) -> torch.Tensor:
    return (output.logprobs_BK * torch.linspace(0.5, 1.5, output.logprobs_BK.shape[1])).sum()


class Merged(torch.nn.Module):
    """W + scale·B·A, by hand."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.double()), torch.nn.Parameter(b.double())
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def by_hand(source: Path, adapters: dict[str, torch.Tensor], layers: list[str]) -> tuple[Any, dict[str, Merged]]:
    """Return the plain model in float64 whose ``layers`` compute with W + scale·B·A, and the modules that add them."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager").eval()
    model.requires_grad_(False)
    made = {}
    for layer in layers:
        made[layer] = Merged(adapters[f"{layer}.lora_A"], adapters[f"{layer}.lora_B"], LORA["alpha"] / LORA["rank"])
        parametrize.register_parametrization(model.get_submodule(layer), "weight", made[layer])
    return model, made


@pytest.mark.parametrize("targets", [None, ["q_proj", "mlp.down_proj"]])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_the_gradients_are_those_of_a_plain_model_in_float64(model_directory, world, targets, recompute):
    backend = made_backend(model_directory, world, lora=LORA | {"targets": targets}, recompute=recompute)
    adapters = {name: local.detach().clone() for name, local in backend._optimizer.local.items()}
    layers = [layer for layer in LAYERS if targets is None or layer.endswith(tuple(f".{end}" for end in targets))]
    assert adapters.keys() == {f"{layer}.lora_{part}" for layer in layers for part in "AB"}
    tokens = microbatch()
    (output,) = backend.run([tokens], loss)

    model, made = by_hand(model_directory, adapters, layers)
    logits = model(input_ids=tokens.token_ids_BL).logits[:, tokens.keep_K] / tokens.temperature_B[:, None, None]
    logprobs_BK = logits.log_softmax(-1).gather(-1, tokens.targets_BK[..., None]).squeeze(-1)
    loss(0, Output(logprobs_BK)).backward()
    # float32 numbers near the largest, -7.4, are 5e-7 apart; which of them comes out depends on the CPU's kernels
    torch.testing.assert_close(output.logprobs_BK.double(), logprobs_BK.detach(), rtol=5e-7, atol=2e-6)
    gradients = whole_gradients(backend)
    assert gradients.keys() == adapters.keys()
    for layer in layers:
        for part, parameter in ((".lora_A", made[layer].a), (".lora_B", made[layer].b)):
            found = gradients[layer + part].double()
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-3
            torch.testing.assert_close(found, parameter.grad, rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        for name, tensor in backend.named_tensors():
            expected = model.get_submodule(name.rpartition(".")[0]).weight if name.endswith("weight") else None
            if expected is not None:
                torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)


def test_only_adapters_have_gradients_and_moments_and_the_model_never_changes(model_directory, world, job, batch):
    stored = load_file(model_directory / "model.safetensors")
    made = job(trainer={"lora": LORA, "optimizer": OPTIMIZER_SETTINGS})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    assert before.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in before.items()), "B is 0: nothing is added"
    train(world, model_directory, made, [batch(seed, step=seed) for seed in range(2)], backend)
    own = {name: parameter for name, parameter in backend.model.named_parameters() if ".lora_" not in name}
    assert own.keys() == stored.keys()
    for name, parameter in own.items():
        assert parameter.grad is None and not parameter.requires_grad
        assert torch.equal(parameter, stored[name])
    trained = {id(local) for local in backend._optimizer.local.values()}
    assert len(trained) == 2 * len(LAYERS)
    assert {id(local) for local in backend._optimizer.state} == trained
    after = dict(backend.named_tensors())
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{layer}.weight" for layer in LAYERS}


def test_the_model_is_kept_in_the_type_of_the_forward_pass(model_directory, world, job, batch):
    made = job(trainer={"lora": LORA, "dtype": "bfloat16", "optimizer": OPTIMIZER_SETTINGS})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    train(world, model_directory, made, [batch()], backend)
    kinds = {(".lora_" in name, parameter.dtype) for name, parameter in backend._parameters.items()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    layer = LAYERS[0]
    a, b = (backend._optimizer.local[f"{layer}.lora_{part}"].detach() for part in "AB")
    own = backend._parameters[f"{layer}.weight"].to_local().float()
    merged = dict(backend.named_tensors())
    assert torch.equal(merged[f"{layer}.weight"], torch.addmm(own, b, a, alpha=1.5))
    on_the_wire = dict(backend.named_tensors(torch.bfloat16))
    assert all(torch.equal(on_the_wire[name], tensor.to(torch.bfloat16)) for name, tensor in merged.items())


def test_the_merged_model_is_the_trained_model(model_directory, job, batch, tmp_path, world):
    made = job(trainer={"lora": LORA, "optimizer": OPTIMIZER_SETTINGS})
    save(world, model_directory, made, [batch(seed, step=seed) for seed in range(2)], tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    backend.load(checkpoint)
    (trained,) = backend.run([microbatch()], None)
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = microbatch()
    with torch.no_grad():
        logits = whole(input_ids=tokens.token_ids_BL).logits[:, tokens.keep_K] / tokens.temperature_B[:, None, None]
    logprobs_BK = logits.log_softmax(-1).gather(-1, tokens.targets_BK[..., None]).squeeze(-1)
    torch.testing.assert_close(trained.logprobs_BK, logprobs_BK, rtol=0, atol=5e-6)


def continued(world: World, source: Path, job: Any, steps: list[Any], storage: Path) -> Any:
    """Return this rank's tensors after all steps, and after a resume from a checkpoint in between."""
    backend = FsdpBackend(source, job.spec.trainer, world)
    save(world, source, job, steps[:2], storage)
    train(world, source, job, steps, backend)
    resumed = FsdpBackend(source, job.spec.trainer, world)
    resumed.load(storage / "checkpoints" / "step-000001")
    train(world, source, job, steps[2:], resumed)
    found = []
    for each in (backend, resumed):
        saved = each.save()
        found.append({name: tensor.numpy() for name, tensor in (saved.weights | saved.optimizer).items()})
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(model_directory, job, batch, tmp_path, size):
    made = job(trainer={"lora": LORA, "optimizer": OPTIMIZER_SETTINGS})
    steps = [batch(seed, step=seed) for seed in range(4)]
    whole, resumed = map(ChainMap, *on_ranks(size, continued, model_directory, made, steps, tmp_path))
    assert whole.keys() == resumed.keys()
    assert sum(name.startswith("adapter.") for name in whole) == 2 * len(LAYERS)
    for name, expected in whole.items():
        assert resumed[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("exchange_bytes", [0, 1 << 30])
def test_two_ranks_train_the_adapters_of_one(model_directory, job, batch, exchange_bytes):
    made = job(trainer={"lora": LORA, "microbatchTokens": 20, "optimizer": OPTIMIZER_SETTINGS})
    steps = [batch(seed, step=seed) for seed in range(3)]
    (alone,) = on_ranks(1, train, model_directory, made, steps)
    compare(on_ranks(2, train, model_directory, made, steps, None, exchange_bytes), alone)


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_three(model_directory, job, batch, tmp_path):
    made = job(trainer={"lora": LORA, "microbatchTokens": 60, "optimizer": OPTIMIZER_SETTINGS})
    on_ranks(2, save, model_directory, made, [batch(0)], tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    stored = ChainMap(*(load_file(file) for file in checkpoint.rglob("*.safetensors")))
    for size in (1, 3):
        results = on_ranks(size, resume, made, batch(1, step=1), tmp_path, model_directory)
        loaded = ChainMap(*(part for part, *_ in results))
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(torch.tensor(loaded[name]), stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ["q_proj", "query"]}, r"spec\.trainer\.lora\.targets\[1\]: .* has no layer query; choose from d"),
        ({"targets": ["lm_head"]}, r"has no layer lm_head; choose from down_proj, gate_proj, k_proj, o_proj, "),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(model_directory, world, lora, message):
    with pytest.raises(ModelError, match=message):
        FsdpBackend(model_directory, Trainer.model_validate({"dtype": "float32", "lora": lora}), world)


def test_a_model_without_linear_layers_is_refused(tmp_path, world):
    config = AutoConfig.for_model("gpt2", vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # its layers are transformers' Conv1D
    with pytest.raises(ModelError, match=r"names no linear layers of this model; remove spec\.trainer\.lora"):
        FsdpBackend(tmp_path, Trainer.model_validate({"dtype": "float32", "lora": {}}), world)
