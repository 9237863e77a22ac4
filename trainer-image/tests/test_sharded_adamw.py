"""The optimizer in the memory of the host: the bits of the optimizer on the device, and where its tensors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from test_ranks import OPTIMIZER_SETTINGS, save, train

from rljob.api.models import RLJob
from rljob.api.roles import Trainer
from rljob.trainer.backends.fsdp import sharded_adamw
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.process_group import World

DECAYED = OPTIMIZER_SETTINGS | {"weightDecay": 0.1}
SCHEDULED = DECAYED | {"decayed": "matrices", "warmupSteps": 1, "schedule": "cosine", "scheduleSteps": 4}


def as_on_a_gpu() -> Any:
    """Make the memory of the host another one than that of the device, as on a GPU."""
    return mock.patch.object(sharded_adamw, "is_apart", return_value=True)


def bits(backend: FsdpBackend) -> dict[str, bytes]:
    saved = backend.save()
    return {name: tensor.numpy().tobytes() for name, tensor in (saved.weights | saved.optimizer).items()}


def trained_and_resumed(
    world: World, source: Path, plain: RLJob, offload: RLJob, steps: list[Any], storage: Path
) -> list[dict[str, bytes]]:
    """Return the state after all steps on the device, in the memory of the host, and there after a resume."""
    on_device = FsdpBackend(source, plain.spec.trainer, world)
    train(world, source, plain, steps, on_device)
    with as_on_a_gpu():
        offloaded = FsdpBackend(source, offload.spec.trainer, world)
        train(world, source, offload, steps, offloaded)
        save(world, source, offload, steps[:2], storage)
        checkpoint = storage / "checkpoints" / "step-000001"
        initial = source if offload.spec.trainer.lora else checkpoint
        resumed = FsdpBackend(initial, offload.spec.trainer, world)
        resumed.load(checkpoint)
        train(world, source, offload, steps[2:], resumed)
    return [bits(backend) for backend in (on_device, offloaded, resumed)]


@pytest.mark.parametrize(("size", "lora"), [(1, None), (2, {"rank": 4})])
def test_an_offloaded_optimizer_gives_the_bits_of_one_on_the_device(model_directory, job, batch, tmp_path, size, lora):
    plain, offloaded = (
        job(trainer={"lora": lora, "microbatchTokens": 60, "optimizer": SCHEDULED | {"offload": offload}})
        for offload in (False, True)
    )
    steps = [batch(seed, step=seed) for seed in range(3)]
    results = on_ranks(size, trained_and_resumed, model_directory, plain, offloaded, steps, tmp_path)
    on_device, *others = results[0]
    assert len(on_device) > 10
    for other in others:
        assert other == on_device


def test_moments_and_what_adamw_changes_are_no_memory_of_the_device(model_directory, world, job, batch):
    made = job(trainer={"optimizer": DECAYED | {"offload": True}})
    with as_on_a_gpu():
        backend = FsdpBackend(model_directory, made.spec.trainer, world)
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    result = train(world, model_directory, made, [batch()], backend)
    assert result[1]["updates_skipped"] == 0
    shards = {name: parameter.to_local() for name, parameter in backend._trained.items()}
    for name, local in backend._optimizer.local.items():
        assert torch.equal(local, shards[name]) and local.data_ptr() != shards[name].data_ptr()
        assert not torch.equal(shards[name], before[name])
    assert set(backend._optimizer.state) == set(backend._optimizer.local.values())


def test_on_a_cpu_offload_copies_nothing(model_directory, world):
    settings = Trainer.model_validate({"dtype": "float32", "optimizer": {"offload": True}})
    backend = FsdpBackend(model_directory, settings, world)
    shards = {name: parameter.to_local().data_ptr() for name, parameter in backend._trained.items()}
    assert {name: local.data_ptr() for name, local in backend._optimizer.local.items()} == shards


@pytest.mark.parametrize("decayed", ["all", "matrices"])
def test_weight_decay_applies_to_the_chosen_parameters_alone(model_directory, world, decayed):
    settings = {"learningRate": 0.1, "weightDecay": 0.5, "decayed": decayed}
    backend = FsdpBackend(model_directory, Trainer.model_validate({"dtype": "float32", "optimizer": settings}), world)
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    zero = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    backend._optimizer.update(0, zero)
    norms_and_biases = {name for name in before if "norm" in name or name.endswith("bias")}
    assert 5 < len(norms_and_biases) < len(before)
    for name, tensor in backend.named_tensors():
        kept = decayed == "matrices" and name in norms_and_biases
        torch.testing.assert_close(tensor, before[name] * (1.0 if kept else 0.95), rtol=1e-6, atol=0)


def test_a_bias_of_experts_is_no_matrix():
    matrix = torch.zeros(4, 3)
    assert not sharded_adamw.is_matrix("model.layers.0.mlp.experts.down_proj_bias", matrix)
    assert sharded_adamw.is_matrix("model.embed_tokens.weight", matrix)
