"""Steps of Megatron-Core: gradients that are not finite, layers that are computed again, bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from test_megatron_layouts import OPTIMIZER, loss, microbatches_of, reference, small_model, split, start, whole

from rljob.api.models import RLJob
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
        results.append({"logprobs": [each.numpy() for each in given], "norm": update.norm, "computed": computed})
    return results


def test_bfloat16_and_layers_that_are_computed_again(job, tmp_path):
    source = small_model(tmp_path / "model", "qwen2", False)
    trainer = {"optimizer": OPTIMIZER, "backend": "megatron"}
    options = [{}, {"recompute": "layer"}, {"dtype": "bfloat16"}]
    ((plain, recomputed, rounded),) = on_ranks(1, run_in, source, [job(trainer=trainer | each) for each in options])
    assert plain["computed"] == 1 and recomputed["computed"] == 2
    assert plain["norm"] == recomputed["norm"]
    expected = reference(source)
    for ours, theirs, mask in zip(rounded["logprobs"], expected["logprobs"], expected["masks"], strict=True):
        difference = (torch.tensor(ours).double() - theirs.where(mask, 0.0)).abs().max()
        assert 1e-5 < difference < 0.05
    assert abs(rounded["norm"] / expected["norms"][0] - 1) < 0.02
