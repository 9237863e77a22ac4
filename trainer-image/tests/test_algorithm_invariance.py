"""Every preset gives the same update with other microbatches, another order of groups, and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks
from training_steps import apply, noisy_copy

from rljob.api.algorithm_presets import PRESETS, frozen_models
from rljob.api.models import RLJob
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.backends.trained_critic import TrainedCritic
from rljob.trainer.frozen_models import load_critic, load_models
from rljob.trainer.process_group import World

LARGE, SMALL = 10_000, 20
OPTIMIZER = {"learningRate": 1e-3, "maxGradNorm": 1e9, "epsilon": 1e-3}
METRICS = ("loss", "grad_norm", "clip_fraction", "ratio_mean", "correction_mean", "masked_fraction", "advantage_abs")
OF_MODELS = ("reference_kl_k1", "reference_kl_k3", "teacher_kl_k1", "teacher_kl_k3")
OF_MODELS += ("value_loss", "value_mean", "value_clip_fraction", "explained_variance", "critic_grad_norm")
FROZEN: dict[str, dict[str, Any]] = {
    "kl in the loss": {"klCoefficient": 0.5, "referenceModel": "other", "minibatches": 3},
    "kl in the reward": {"klCoefficient": 0.5, "referenceModel": "other", "klIn": "reward", "preset": "reinforce_pp"},
    "kl in the reward of samples": {"klCoefficient": 0.5, "referenceModel": "other", "klIn": "reward"},
    "distillation": {"preset": "distillation", "teachers": [{"model": "other"}], "minibatches": 3},
}
"""Algorithms with a second model."""
STABILIZED = {
    "preset": "grpo",
    "minibatches": 1,
    "whitenAdvantages": True,
    "advantageClip": 1.5,
    "overlongBuffer": 8,
    "vetoBelow": 0.5,
    "correctionLevel": "segment",
}

SELECTING = {
    "clip_cov": {"objective": "clip_cov", "minibatches": 3, "covarianceShare": 0.2, "covarianceLow": 0.01},
    "kl_cov": {"objective": "kl_cov", "minibatches": 3, "covarianceShare": 0.2, "covariancePenalty": 10},
}
"""Objectives that compare the tokens of the whole batch."""

ACCUMULATED = ("dr_grpo", "rloo", "gspo", "cispo", "vapo", "kl in the loss", "distillation", "stabilized")
"""Algorithms with each aggregation, denominator of the ratio and kind of second model."""


def update(
    world: World,
    source: Path,
    jobs: dict[str, RLJob],
    batch: tuple[Train, list[SampleTokens]],
    budget: int,
    accumulated: int = 1,
):
    """Return the metrics and the changed parameters of one batch by name of the job."""
    results = {}
    for name, job in jobs.items():
        backend = FsdpBackend(source, job.spec.trainer, world)
        used = frozen_models(job.spec.algorithm).values()
        sources = {model.name: Path(model.source) for model in job.spec.models if model.name in used}
        frozen = load_models(job.spec.algorithm, sources, source, backend)
        critic = load_critic(job.spec.algorithm, job.spec.trainer, {"policy": source}, source, backend, None)
        networks = {"": backend} | ({"critic ": critic.network} if isinstance(critic, TrainedCritic) else {})

        def weights(networks: dict[str, FsdpBackend] = networks) -> dict[str, Any]:
            return {
                name + key: tensor.numpy().copy()
                for name, network in networks.items()
                for key, tensor in network.named_tensors()
            }

        others = {"frozen": frozen, "critic": critic, "accumulated": accumulated}
        if critic is not None:  # the values of a new critic are 0
            apply(world, backend, job.spec.algorithm, *batch, budget, **others)
        before = weights()
        metrics = apply(world, backend, job.spec.algorithm, *batch, budget, **others).metrics
        changes = {key: tensor - before[key] for key, tensor in weights().items()}
        results[name] = {key: metrics[key] for key in (*METRICS, *OF_MODELS) if key in metrics}, changes
    return results


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, (metrics, changes) in expected.items():
        assert found[name][0] == pytest.approx(metrics, rel=1e-4, abs=1e-5), name
        for key, change in changes.items():
            np.testing.assert_allclose(found[name][1][key], change, rtol=0, atol=1e-6, err_msg=name)
        assert max(abs(change).max() for change in changes.values()) > 5e-4, name


@pytest.fixture
def jobs(job, model_directory, tmp_path) -> dict[str, RLJob]:
    """A job for each preset with three minibatches, one with changes of rewards, advantages and weights, and those with
    models that are not trained."""
    trainer = {"optimizer": OPTIMIZER}
    plain = [name for name in PRESETS if name not in FROZEN]
    warm = {"vapo": {"criticWarmupSteps": 0}}
    made = {
        name: job(algorithm={"preset": name, "minibatches": 3, **warm.get(name, {})}, trainer=trainer) for name in plain
    }
    other = str(noisy_copy(model_directory, tmp_path / "other"))
    models = [{"name": "policy", "source": str(model_directory)}, {"name": "other", "source": other}]
    made |= {name: job(algorithm=fields, models=models, trainer=trainer) for name, fields in FROZEN.items()}
    made |= {name: job(algorithm=fields, trainer=trainer) for name, fields in SELECTING.items()}
    return made | {"stabilized": job(algorithm=STABILIZED, trainer=trainer)}


def test_microbatches_and_the_order_of_groups_do_not_change_an_update(model_directory, job, jobs, batch):
    train, tokens = batch(3)
    (whole,) = on_ranks(1, update, model_directory, jobs, (train, tokens), LARGE)
    close(on_ranks(1, update, model_directory, jobs, (train, tokens), SMALL)[0], whole)
    jobs = {name: made.model_copy(deep=True) for name, made in jobs.items()}
    for made in jobs.values():
        made.spec.algorithm.minibatches = 1
    order = [6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5]
    moved = Train(1, 0, [train.samples[i] for i in order], False), [tokens[i] for i in order]
    (whole,) = on_ranks(1, update, model_directory, jobs, (train, tokens), LARGE)
    close(on_ranks(1, update, model_directory, jobs, moved, SMALL)[0], whole)


def test_accumulated_minibatches_are_fewer_minibatches(model_directory, jobs, batch):
    chosen = {name: jobs[name].model_copy(deep=True) for name in ACCUMULATED}
    for made in chosen.values():
        made.spec.algorithm.minibatches = 2
    (fewer,) = on_ranks(1, update, model_directory, chosen, batch(3), SMALL)
    for made in chosen.values():
        made.spec.algorithm.minibatches = 4
    close(on_ranks(1, update, model_directory, chosen, batch(3), SMALL, 2)[0], fewer)


@pytest.mark.parametrize(("ranks", "groups", "members"), [(2, 4, 3), (4, 1, 3)], ids=["two", "an empty one"])
def test_ranks_do_not_change_an_update(model_directory, jobs, batch, ranks, groups, members):
    data = batch(3, groups=groups, members=members)
    for i, (sample, tokens) in enumerate(zip(data[0].samples, data[1], strict=True)):
        sample.reward = tokens.segments[-1].reward = float(i % 2 == 0)
    (alone,) = on_ranks(1, update, model_directory, jobs, data, LARGE)
    for found in on_ranks(ranks, update, model_directory, jobs, data, SMALL):
        close(found, alone)
