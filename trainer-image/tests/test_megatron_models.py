"""A frozen model and a critic on Megatron-Core give what transformers gives in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from test_megatron_layouts import (
    INTERLEAVED,
    OPTIMIZER,
    PACKED,
    STEPS,
    THOROUGH,
    in_files,
    microbatches,
    microbatches_of,
    reference,
    small_model,
    split,
    start,
)
from transformers import AutoModelForCausalLM

from rljob.api.models import RLJob
from rljob.protocol.checkpoint_record import TrainerState
from rljob.trainer.backends.base import LoadsFrozenModels, SavedState, TrainsCritic
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import CheckpointStore, read_configuration
from rljob.trainer.process_group import World

LAYOUTS = [PACKED | {"tensor": 2}, INTERLEAVED, *([{"context": 2}, {}, {"pipeline": 2}] if THOROUGH else [])]


def value_loss(microbatch: Microbatch, values_BK: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of the values to numbers that differ from token to token."""
    target_BK = torch.linspace(-1, 2, microbatch.targets_BK.numel()).view_as(microbatch.targets_BK)
    return ((values_BK - target_BK) ** 2).where(microbatch.mask_BK, 0.0).sum() / 20


def reference_critic(source: Path) -> dict[str, Any]:
    """Return values of the last step, norms of gradients and weights after three steps, by transformers in float64."""
    body = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    ).model
    head = torch.nn.Linear(body.config.hidden_size, 1, dtype=torch.float64)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    named = {f"model.{name}": p for name, p in body.named_parameters()}
    named |= {f"lm_head.{name}": p for name, p in head.named_parameters()}
    options = {"weight_decay": OPTIMIZER["weightDecay"], "eps": OPTIMIZER["epsilon"], "betas": OPTIMIZER["betas"]}
    adamw = torch.optim.AdamW(named.values(), **options)
    result: dict[str, Any] = {"norms": []}
    for step in range(STEPS):
        result["values"] = []
        for microbatch in microbatches(step):
            hidden_BLH = body(microbatch.token_ids_BL).last_hidden_state
            values_BK = head(hidden_BLH[:, microbatch.keep_K]).squeeze(-1)
            value_loss(microbatch, values_BK).backward()
            result["values"].append(values_BK.detach().where(microbatch.mask_BK, 0.0))
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIMIZER["maxGradNorm"])))
        adamw.param_groups[0]["lr"] = OPTIMIZER["learningRate"] * min(1.0, (step + 1) / OPTIMIZER["warmupSteps"])
        adamw.step()
        adamw.zero_grad()
    return result | {"weights": in_files({name: p.detach() for name, p in named.items()})}


def step_critic(critic: Any, backend: Any, step: int) -> dict[str, Any]:
    """Train one step; return the values of this replica's microbatches at the model's tokens, and the norm."""
    world = backend.world
    own = microbatches_of(world, step)
    values = critic.run(own, lambda i, values_BK: value_loss(own[i], values_BK))
    masked = [v_BK.where(m.mask_BK, 0.0).numpy() for v_BK, m in zip(values, own, strict=True) if m.mask_BK.any()]
    return {"values": masked, "norm": critic.update(step).norm, "replica": world.dp_rank, "replicas": world.dp_size}


def train_others(world: World, source: Path, other: Path, jobs: Sequence[RLJob], storage: Path) -> list[dict[str, Any]]:
    """Run a frozen model and train a critic in each layout; resume the critic of the first layout in all of them."""
    results = []
    for number, job in enumerate(jobs):
        backend = start(world, source, job)
        assert isinstance(backend, LoadsFrozenModels) and isinstance(backend, TrainsCritic)
        frozen = backend.load_frozen(other)
        own = microbatches(0)
        scored = frozen.run(own)
        given = [o.logprobs_BK.where(m.mask_BK, 0.0).numpy() for o, m in zip(scored, own, strict=True)]
        assert frozen.metrics()["seconds_frozen"] > 0
        critic = backend.load_critic(source, job.spec.trainer.optimizer)
        steps = [step_critic(critic, backend, step) for step in range(STEPS - 1)]
        saved = backend.save()
        state = TrainerState(STEPS - 1, 0, 1, {}, {})
        both = SavedState(saved.weights, saved.optimizer | critic.save())
        CheckpointStore(storage / str(number)).write(world.with_own_control(), state, read_configuration(source), both)
        steps.append(step_critic(critic, backend, STEPS - 1))
        results.append({"frozen": given, "steps": steps, "weights": weights_of(critic)})
    for job, result in zip(jobs, results, strict=True):
        backend = start(world, source, job)
        critic = backend.load_critic(source, job.spec.trainer.optimizer)
        critic.load(CheckpointStore(storage / "0").path(STEPS - 1))
        step_critic(critic, backend, STEPS - 1)
        result["resumed"] = weights_of(critic)
    return results


def weights_of(critic: Any) -> dict[str, Any]:
    """Return the weights that this rank writes."""
    return {name: tensor.numpy().copy() for name, tensor in critic.network.save().weights.items()}


def resume_by_fsdp(world: World, source: Path, job: RLJob, storage: Path) -> dict[str, Any]:
    """Resume the critic with the FSDP2 backend; return its weights after the third step."""
    backend = FsdpBackend(source, job.spec.trainer, world)
    critic = backend.load_critic(source, job.spec.trainer.optimizer)
    critic.load(CheckpointStore(storage).path(STEPS - 1))
    step_critic(critic, backend, STEPS - 1)
    return weights_of(critic)


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]).double(), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"] if THOROUGH else ["qwen2"])
def test_a_frozen_model_and_a_critic_are_those_of_transformers_in_every_layout(job, tmp_path, kind):
    source = small_model(tmp_path / "model", kind, True)
    torch.manual_seed(3)
    other = small_model(tmp_path / "other", kind, False)
    trainer = {"processesPerNode": 2, "optimizer": OPTIMIZER, "backend": "megatron"}
    jobs = [job(trainer=trainer | split(layout)) for layout in LAYOUTS]
    by_rank = on_ranks(2, train_others, source, other, jobs, tmp_path)
    logprobs, expected = reference(other), reference_critic(source)
    for number in range(len(jobs)):
        ranks = [results[number] for results in by_rank]
        for rank in ranks:
            for ours, theirs, mask in zip(rank["frozen"], logprobs["logprobs"], logprobs["masks"], strict=True):
                found = torch.tensor(ours).double()
                torch.testing.assert_close(found, theirs.where(mask, 0.0), rtol=0, atol=2e-6)
            assert [step["norm"] for step in rank["steps"]] == pytest.approx(expected["norms"], rel=2e-5)
            last = rank["steps"][-1]
            own = expected["values"][last["replica"] :: last["replicas"]]
            for ours, theirs in zip(last["values"], own, strict=True):
                torch.testing.assert_close(torch.tensor(ours).double(), theirs, rtol=0, atol=1e-5)
        for kind_of_weights in ("weights", "resumed"):
            same({k: v for rank in ranks for k, v in rank[kind_of_weights].items()}, expected["weights"])
    (by_fsdp,) = on_ranks(1, resume_by_fsdp, source, job(trainer={"optimizer": OPTIMIZER}), tmp_path / "0")
    same(in_files({name: torch.tensor(weight) for name, weight in by_fsdp.items()}), expected["weights"])
