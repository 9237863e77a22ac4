"""Steps of Megatron-Core: gradients that are not finite, layers that are computed again, bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from test_megatron_layouts import OPTIMIZER, loss, microbatches_of, reference, small_model, split, start, whole

from rljob.api.models import RLJob
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

LAYOUTS = [{}, {"tensor": 2}, {"pipeline": 2}]


def step(backend: Any, factor: float = 1.0) -> tuple[Any, int]:
    """Train one step; return the update, and how often the first layer of this rank computed."""
    own, calls = microbatches_of(backend.world, 0), 0

    def count(*arguments: Any) -> None:
        nonlocal calls
        calls += 1

    attention = backend._network.chunks[0].module.decoder.layers[0].self_attention
    hook = attention.register_forward_hook(count)
    backend.run(own, lambda i, output: factor * loss(own[i], output), entropy=True)
    hook.remove()
    return backend.update(0), calls // len(own)


def skip_an_update(world: World, source: Path, jobs: Sequence[RLJob]) -> list[dict[str, Any]]:
    """Apply a gradient that is not finite on the last replica, and then a finite one."""
    results = []
    for job in jobs:
        backend = start(world, source, job)
        before = whole(backend)
        infinite = backend.world.dp_rank == backend.world.dp_size - 1
        skipped, _ = step(backend, float("inf") if infinite else 1.0)
        between = whole(backend)
        update, _ = step(backend)
        changed = any((between[name] != weight).any() for name, weight in whole(backend).items())
        unchanged = all((between[name] == weight).all() for name, weight in before.items())
        results.append({"skipped": skipped, "update": update, "unchanged": unchanged, "changed": changed})
    return results


def test_a_gradient_that_is_not_finite_changes_nothing(job, tmp_path):
    source = small_model(tmp_path / "model", "qwen2", False)
    trainer = {"processesPerNode": 2, "optimizer": OPTIMIZER, "backend": "megatron"}
    jobs = [job(trainer=trainer | split(layout)) for layout in LAYOUTS]
    norm = reference(source)["norms"][0]
    for number, results in enumerate(zip(*on_ranks(2, skip_an_update, source, jobs), strict=True)):
        for result in results:
            assert result["skipped"].skipped and not result["update"].skipped, LAYOUTS[number]
            assert abs(result["update"].norm / norm - 1) < 2e-5
            assert result["unchanged"]
        assert results[0]["changed"]


def run_in(world: World, source: Path, jobs: Sequence[RLJob]) -> list[dict[str, Any]]:
    """Train one step with each job."""
    results = []
    for job in jobs:
        backend = start(world, source, job)
        own = microbatches_of(world, 0)
        outputs = backend.run(own, None)
        given = [output.logprobs_BK.where(each.mask_BK, 0.0) for output, each in zip(outputs, own, strict=True)]
        update, computed = step(backend)
        name = "decoder.final_layernorm.weight"
        parameter, kept = backend._network.parameters[name], dict(backend.named_tensors())["model.norm.weight"]
        results.append(
            {
                "logprobs": [each.numpy() for each in given],
                "norm": update.norm,
                "computed": computed,
                "packs": backend.packs,
                "gradient": str(parameter.main_grad.dtype).removeprefix("torch."),
                "weight": str(parameter.dtype).removeprefix("torch."),
                "kept": "bfloat16" if (kept == kept.bfloat16()).all() else "float32",
            }
        )
    return results


def load_wrong(world: World, source: Path, jobs: Sequence[RLJob]) -> str:
    """Return the error of weights that do not fit config.json."""
    with pytest.raises(ModelError) as error:
        start(world, source, jobs[0])
    return str(error.value)


def test_weights_that_do_not_fit_the_configuration_are_refused_on_all_ranks(job, tmp_path):
    source = small_model(tmp_path / "model", "qwen2", False)
    weights = load_file(source / "model.safetensors")
    removed = weights.pop("model.layers.3.mlp.up_proj.weight")
    save_file(weights | {"model.layers.4.mlp.up_proj.weight": removed}, source / "model.safetensors")
    jobs = [job(trainer={"processesPerNode": 2, "backend": "megatron", "parallelism": {"pipeline": 2}})]
    first, second = on_ranks(2, load_wrong, source, jobs)
    assert "model.layers.3.mlp.up_proj.weight" in first and first == second


def test_bfloat16_and_layers_that_are_computed_again(job, tmp_path):
    source = small_model(tmp_path / "model", "qwen2", False)
    trainer = {"optimizer": OPTIMIZER, "backend": "megatron"}
    options = [{}, {"recompute": "layer"}, {"dtype": "bfloat16"}, {"packing": "varlen"}]
    found = on_ranks(1, run_in, source, [job(trainer=trainer | each) for each in options])
    ((plain, recomputed, rounded, packed),) = found
    assert plain["computed"] == 1 and recomputed["computed"] == 2
    assert plain["norm"] == recomputed["norm"]
    assert [result["packs"] for result in found[0]] == [False, False, False, True]
    assert packed["norm"] == pytest.approx(plain["norm"], rel=2e-5)
    assert (rounded["gradient"], rounded["weight"], rounded["kept"]) == ("float32", "bfloat16", "float32")
    expected = reference(source)
    for ours, theirs, mask in zip(rounded["logprobs"], expected["logprobs"], expected["masks"], strict=True):
        difference = (torch.tensor(ours).double() - theirs.where(mask, 0.0)).abs().max()
        assert 1e-5 < difference < 0.05
    assert abs(rounded["norm"] / expected["norms"][0] - 1) < 0.02
