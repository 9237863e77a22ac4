"""Reference and teacher in the trainer: a step against plain torch, and which models are refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from training_steps import apply, gradients_of, noisy_copy, reference_logprobs
from transformers import AutoModelForCausalLM

from rljob.api.algorithm import Algorithm
from rljob.api.models import RLJob
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.trainer_protocol import EarlierSteps, Train
from rljob.trainer.backends.base import FrozenModel
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch import Row, collate
from rljob.trainer.batch_plan import split_minibatches
from rljob.trainer.errors import ModelError, UnrecoverableError
from rljob.trainer.frozen_models import load_models, read_sources

OPTIMIZER = {"learningRate": 1e-3, "maxGradNorm": 0.05, "epsilon": 1e-3}
BETA = 0.7
"""Coefficient of KL in the first step, or of the batch, if it adapts."""
KL = {"klCoefficient": BETA, "referenceModel": "other", "minibatches": 2}
CASES: dict[str, dict[str, Any]] = {
    "k2 in the loss": KL | {"klEstimator": "k2"},
    "k3 in the loss": KL,
    "k3_unbiased in the loss without a correction": KL
    | {"klEstimator": "k3_unbiased", "ratio": "behavior", "correction": "none"},
    "k1 in the reward": KL | {"klIn": "reward"},
    "k3 in the reward of each token": KL
    | {"klIn": "reward", "klEstimator": "k3", "preset": "reinforce_pp", "discount": 0.9},
    "adapted in the loss": KL | {"klCoefficient": 0.1, "klTarget": 0.05},
    "adapted in the reward": KL | {"klCoefficient": 0.1, "klTarget": 0.05, "klIn": "reward"},
    "a teacher": {"preset": "distillation", "teachers": [{"model": "other"}], "minibatches": 2},
    "a teacher and rewards": {"teachers": [{"model": "other", "weight": 0.3}], "advantageClip": 1.5},
}


@pytest.fixture
def made(job, model_directory, tmp_path):
    """Function that makes a job with a second model, other."""
    other = noisy_copy(model_directory, tmp_path / "other")
    models = [{"name": "policy", "source": str(model_directory)}, {"name": "other", "source": str(other)}]

    def make(algorithm: dict[str, Any], **spec: Any) -> RLJob:
        if "big" in str(algorithm):
            spec["rollouts"] = [{"name": "main", "maxModelLength": 512}, {"name": "big", "model": "other"}]
        named = "other" in str(algorithm) or "rollouts" in spec
        return job(algorithm=algorithm, models=models if named else models[:1], **spec)

    return make


def load(made: RLJob, backend: FsdpBackend) -> dict[str, FrozenModel]:
    environment = ComponentEnvironment(made, Path("/nowhere"), "", "", "", "", "")
    policy = Path(made.spec.models[0].source)
    return load_models(made.spec.algorithm, read_sources(environment), policy, backend)


def penalty(estimator: str, difference: Any, fixed: Any) -> Any:
    """Return the estimate of KL from l − l_ref; ``fixed`` is the same without gradient."""
    k3 = (-difference).exp() + difference - 1
    return {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": k3,
        "k3_unbiased": (difference - fixed).exp() * k3,
    }[estimator]


def advantages(algorithm: Algorithm, train: Train, old: list[Any], other: list[Any]) -> list[Any]:
    """Return the advantage of each of the model's tokens of each sample."""
    rewards = []
    for sample, l_old, l_other in zip(train.samples, old, other, strict=True):
        each = torch.zeros(len(l_old), dtype=torch.float64)
        each[-1] = sample.reward
        if algorithm.kl_in == "reward":
            each -= BETA * penalty(algorithm.kl_estimator, (l_old - l_other).double(), 0)
        rewards.append(each)
    if algorithm.advantage == "reinforce_pp":
        returns = [
            torch.stack([sum(0.9 ** (u - t) * each[u] for u in range(t, len(each))) for t in range(len(each))])
            for each in rewards
        ]
        tokens = torch.cat(returns)
        found = [(each - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for each in returns]
    elif algorithm.advantage == "zero":
        found = [torch.zeros_like(each) for each in rewards]
    else:
        totals = torch.stack([each.sum() for each in rewards])
        groups = [sample.group for sample in train.samples]
        members = [totals[[own == group for own in groups]] for group in groups]
        found = [
            ((total - own.mean()) / (own.std() + 1e-6)).expand(len(each))
            for total, own, each in zip(totals, members, rewards, strict=True)
        ]
    for teacher in algorithm.teachers:
        found = [
            each + teacher.weight * (l_other - l_old) for each, l_other, l_old in zip(found, other, old, strict=True)
        ]
    bound = algorithm.advantage_clip or 1e9
    return [each.clamp(-bound, bound).float() for each in found]


def plain_gradients(made: RLJob, train: Train, shard: list[SampleTokens]) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Return the last gradient of a batch before clipping, l_old and those of the other model at the model's tokens."""
    algorithm = made.spec.algorithm
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.float32) for model in made.spec.models
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-3, weight_decay=0)

    def of(model: torch.nn.Module, i: int) -> torch.Tensor:
        sample = train.samples[i]
        return reference_logprobs(model, shard[i], sample.temperature)[sample.prompt_tokens - 1 :]

    with torch.no_grad():
        old, other = ([of(model, i) for i in range(len(shard))] for model in (policy, frozen))
    given = advantages(algorithm, train, old, other)
    for minibatch in split_minibatches([sample.group for sample in train.samples], algorithm.minibatches):
        loss = torch.zeros(())
        for i in minibatch:
            now = of(policy, i)
            behavior = torch.from_numpy(np.frombuffer(shard[i].logprobs, np.float32).copy())[-len(now) :]
            ratio = (now - (behavior if algorithm.ratio == "behavior" else old[i])).exp()
            value = torch.minimum(ratio * given[i], ratio.clamp(0.8, 1.2) * given[i])
            value = torch.where(given[i] < 0, torch.maximum(value, 3 * given[i]), value)
            if algorithm.kl_in == "loss":
                difference = now - other[i]
                value = value - BETA * penalty(algorithm.kl_estimator, difference, difference.detach())
            if algorithm.correction == "tis":
                value = value * (old[i] - behavior).exp().clamp(max=2)
            loss = loss - value.sum() / sum(train.samples[j].response_tokens for j in minibatch)
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.05)
        optimizer.step()
    return gradients, old, other


@pytest.mark.parametrize(
    ("case", "budget"),
    [*((case, 10_000) for case in CASES), ("k3 in the loss", 20), ("k3 in the reward of each token", 20)],
)
def test_a_step_gives_the_gradient_of_plain_torch(world, made, batch, case, budget):
    made = made(CASES[case], trainer={"optimizer": OPTIMIZER})
    train, shard = batch()
    if made.spec.algorithm.kl_target is not None:
        train = msgspec.structs.replace(train, earlier=EarlierSteps(kl_coefficient=BETA))
    backend = FsdpBackend(Path(made.spec.models[0].source), made.spec.trainer, world)
    gradients = gradients_of(backend)
    result = apply(world, backend, made.spec.algorithm, train, shard, budget, frozen=load(made, backend))
    expected, old, other = plain_gradients(made, train, shard)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=2e-6)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.01
    role = "teacher" if made.spec.algorithm.teachers else "reference"
    if made.spec.algorithm.minibatches == 1:
        mean = float((torch.cat(old) - torch.cat(other)).mean())
        assert result.metrics[f"{role}_kl_k1"] == pytest.approx(mean, abs=1e-5)
    assert result.metrics[f"{role}_kl_k3"] > 0.01 and result.metrics["seconds_frozen"] > 0
    assert result.metrics.get("kl_coefficient") == (BETA if role == "reference" else None)


@pytest.mark.parametrize("budget", [10_000, 20])
@pytest.mark.parametrize("case", ["k3 in the loss", "k1 in the reward", "a teacher", "a teacher and rewards"])
def test_log_probabilities_of_a_pool_have_the_effect_of_the_same_model_in_the_trainer(world, made, batch, case, budget):
    def trained(fields: dict[str, Any], shard: list[SampleTokens]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        job = made(fields, trainer={"optimizer": OPTIMIZER})
        backend = FsdpBackend(Path(job.spec.models[0].source), job.spec.trainer, world)
        frozen = load(job, backend)
        assert bool(frozen) == (fields == CASES[case])
        metrics = apply(world, backend, job.spec.algorithm, train, shard, budget, frozen=frozen).metrics
        return {name: tensor.clone() for name, tensor in backend.named_tensors()}, metrics

    train, shard = batch()
    _, _, other = plain_gradients(made(CASES[case], trainer={"optimizer": OPTIMIZER}), train, shard)
    taught = "teachers" in CASES[case]
    role, kind = ("teachers[0]", "teacher") if taught else ("reference", "reference")
    of_pool = [
        msgspec.structs.replace(tokens, models={role: each.numpy().astype("<f4").tobytes()})
        for tokens, each in zip(shard, other, strict=True)
    ]
    if taught:
        weight = CASES[case]["teachers"][0].get("weight", 1)
        fields = CASES[case] | {"teachers": [{"pool": "big", "weight": weight}]}
    else:
        fields = {name: value for name, value in CASES[case].items() if name != "referenceModel"}
        fields["referencePool"] = "big"
    expected, metrics = trained(CASES[case], shard)
    found, of_found = trained(fields, of_pool)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6)
    for name in (f"{kind}_kl_k1", f"{kind}_kl_k3", "loss"):
        assert of_found[name] == pytest.approx(metrics[name], abs=1e-5)
    with pytest.raises(UnrecoverableError, match=rf"sample g0.0 has no log-probabilities of the model {kind}"):
        trained(fields, shard)
    short = msgspec.structs.replace(of_pool[0], models={role: of_pool[0].models[role][4:]})
    with pytest.raises(UnrecoverableError, match="do not cover its response"):
        trained(fields, [short, *of_pool[1:]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_the_first_weights_gives_the_same_bits_and_never_changes(world, made, batch, dtype):
    made = made({"klCoefficient": 0.3}, trainer={"dtype": dtype, "optimizer": OPTIMIZER})
    assert made.spec.algorithm.reference_model == "policy"
    backend = FsdpBackend(Path(made.spec.models[0].source), made.spec.trainer, world)
    frozen = load(made, backend)

    def parameters() -> dict[str, torch.Tensor]:
        found = dict(frozen["reference"].model.named_parameters())
        assert not any(tensor.requires_grad for tensor in found.values())
        return {name: (t.to_local() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}

    before = parameters()
    first, second = (
        apply(world, backend, made.spec.algorithm, *batch(step=step), 60, frozen=frozen).metrics for step in range(2)
    )
    assert first["reference_kl_k1"] == first["reference_kl_k3"] == 0
    assert second["reference_kl_k3"] > 0
    for name, tensor in parameters().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == getattr(torch, dtype)


def give_all(train: Train, shard: list[SampleTokens], reward: float) -> None:
    """Give every sample the same reward."""
    for sample, tokens in zip(train.samples, shard, strict=True):
        sample.reward = tokens.segments[-1].reward = reward


def test_samples_without_an_advantage_are_computed_for_the_kl_in_the_loss(world, made, batch):
    train, shard = batch()
    give_all(train, shard, 1.0)
    norms = {}
    for name, fields in {"none": {}, "loss": KL, "teacher": CASES["a teacher"]}.items():
        chosen = made(fields, trainer={"optimizer": OPTIMIZER})
        backend = FsdpBackend(Path(chosen.spec.models[0].source), chosen.spec.trainer, world)
        metrics = apply(world, backend, chosen.spec.algorithm, train, shard, 60, frozen=load(chosen, backend)).metrics
        norms[name] = metrics["samples_trained"], metrics["grad_norm"] > 1e-3
    assert norms == {"none": (0, False), "loss": (12, True), "teacher": (12, True)}


def test_signs_and_difficulties_are_those_of_rewards_without_kl(world, made, batch):
    """A KL term must not turn a wrong answer into one with a positive reward, or a solved group into a hard one."""
    train, shard = batch()
    give_all(train, shard, 1.0)
    fields = KL | {"klIn": "reward", "preset": "raft_pp", "klCoefficient": 5.0}

    def trained(more: dict[str, Any]) -> Any:
        chosen = made(fields | more, trainer={"optimizer": OPTIMIZER})
        backend = FsdpBackend(Path(chosen.spec.models[0].source), chosen.spec.trainer, world)
        return apply(world, backend, chosen.spec.algorithm, train, shard, 60, frozen=load(chosen, backend))

    assert (trained({}).advantages_N > 0).any() and trained({}).metrics["grad_norm"] > 0.01
    assert not trained({"difficultyBelow": 1.0}).advantages_N.any()
    give_all(train, shard, 0.0)
    result = trained({})
    assert (result.advantages_N > 0).any() and result.metrics["grad_norm"] == 0


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_an_estimator_of_a_user_that_fails_is_named(world, made, batch, monkeypatch, place):
    returned: dict[str, Any] = {"value": None}
    module = SimpleNamespace(mine=lambda own, other: returned["value"])
    monkeypatch.setitem(sys.modules, "my_estimators", module)
    chosen = made(KL | {"klIn": place, "klEstimator": "my_estimators:mine"})
    backend = FsdpBackend(Path(chosen.spec.models[0].source), chosen.spec.trainer, world)
    frozen = load(chosen, backend)
    for value, problem in ((None, "it returned NoneType"), (torch.zeros(3), "it returned a tensor of shape")):
        returned["value"] = value
        with pytest.raises(UnrecoverableError, match=rf"^spec.algorithm.klEstimator: my_estimators:mine .*{problem}"):
            apply(world, backend, chosen.spec.algorithm, *batch(), 60, frozen=frozen)


def test_a_model_with_other_tokens_is_refused(world, made, tmp_path):
    chosen = made(KL)
    policy, other = (Path(model.source) for model in chosen.spec.models)
    backend = FsdpBackend(policy, chosen.spec.trainer, world)
    copy = Path(shutil.copytree(policy, tmp_path / "policy"))

    def tokens(directory: Path, vocabulary: Any) -> None:
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))

    def refusal() -> str:
        with pytest.raises(ModelError) as refused:
            load_models(chosen.spec.algorithm, {"other": other}, copy, backend)
        return str(refused.value)

    tokens(copy, {"a": 0, "b": 1})
    load_models(chosen.spec.algorithm, {"other": other}, copy, backend)  # its tokens are not known
    tokens(other, {"a": 0, "b": 1, "c": 2})
    load_models(chosen.spec.algorithm, {"other": other}, copy, backend)
    tokens(other, [["a", -1.5], ["c", -2.5]])
    assert refusal() == (
        "spec.models: token 1 of other is 'c' and that of the policy is 'b'; choose a model with the tokens of the "
        "policy"
    )
    tokens(other, {"a": 0})
    backend.vocabulary += 1
    assert refusal() == (
        "spec.models: other has 61 token ids and the policy 62; choose a model with the tokens of the policy"
    )


def test_a_backend_that_runs_no_other_models_is_refused(made):
    chosen = made(KL)
    backend: Any = SimpleNamespace(vocabulary=61)
    with pytest.raises(
        ModelError, match=r"^spec.trainer.backend: SimpleNamespace runs no models .*; set fsdp, or remove"
    ):
        load(chosen, backend)
    assert load(made({}), backend) == {}


def test_a_model_with_two_roles_runs_once(world, made, batch):
    chosen = made(KL | {"teachers": [{"model": "other"}]})
    backend = FsdpBackend(Path(chosen.spec.models[0].source), chosen.spec.trainer, world)
    frozen = load(chosen, backend)
    assert frozen["reference"] is frozen["teachers[0]"]
    calls = []
    run = frozen["teachers[0]"].run
    frozen["teachers[0]"].run = lambda microbatches: (calls.append(len(microbatches)), run(microbatches))[1]
    metrics = apply(world, backend, chosen.spec.algorithm, *batch(), 10_000, frozen=frozen).metrics
    assert calls == [1, 1], "once for each minibatch"
    assert metrics["reference_kl_k3"] == metrics["teacher_kl_k3"]


def test_a_frozen_model_has_the_log_probabilities_of_plain_transformers(world, made, batch):
    chosen = made(KL)
    backend = FsdpBackend(Path(chosen.spec.models[0].source), chosen.spec.trainer, world)
    train, shard = batch()
    model = AutoModelForCausalLM.from_pretrained(chosen.spec.models[1].source, dtype=torch.float32)
    ids = np.frombuffer(shard[0].token_ids, np.int32).astype(np.int64)
    mask = np.arange(len(ids)) >= train.samples[0].prompt_tokens
    row = Row(ids, np.zeros(len(ids), np.float32), mask, np.zeros(len(ids)))
    (output,) = load(chosen, backend)["reference"].run([collate([row], [0.8], world.device)])
    expected = reference_logprobs(model, shard[0], 0.8)[-int(mask.sum()) :]
    torch.testing.assert_close(output.logprobs_BK[0], expected.detach(), rtol=0, atol=1e-5)
    assert not output.logprobs_BK.requires_grad
