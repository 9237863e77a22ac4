"""The critic: returns and its loss against NumPy in float64, a step against plain torch, warm-up, checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from ranks import on_ranks
from safetensors.torch import load_file
from test_advantages import WORLD
from training_steps import apply, noisy_copy, reference_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.api.models import RLJob
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.checkpoint_record import TrainerState, find_damage
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.gae import discounted_errors, lambda_of
from rljob.trainer.algorithms.needs import requires
from rljob.trainer.backends.base import SavedState
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.backends.trained_critic import TrainedCritic
from rljob.trainer.batch import Row, collate
from rljob.trainer.batch_plan import split_minibatches
from rljob.trainer.checkpoint import CheckpointStore, read_configuration, read_state
from rljob.trainer.critic_step import CriticLoss, ValueStatistics
from rljob.trainer.errors import ModelError, UnrecoverableError
from rljob.trainer.frozen_models import load_critic
from rljob.trainer.process_group import World
from rljob.trainer.step_checks import StepChecks

PPO = {"preset": "ppo", "minibatches": 2, "discount": 0.9, "gaeLambda": 0.8, "valueClip": 0.05}
OPTIMIZER = {"learningRate": 1e-3, "maxGradNorm": 0.05, "epsilon": 1e-3}
TRAINER = {"optimizer": OPTIMIZER, "criticOptimizer": OPTIMIZER | {"learningRate": 3e-2, "maxGradNorm": 0.5}}


def resolved(**fields: Any) -> Algorithm:
    algorithm = Algorithm.model_validate(fields)
    fill(algorithm)
    return algorithm


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0), (1.0, 0.95)])
def test_advantages_are_the_discounted_sum_of_errors_over_all_turns(discount, trace):
    generator = np.random.default_rng(2)
    rewards, values = generator.normal(size=(2, 40))
    mask = generator.random(40) > 0.4
    found = discounted_errors(rewards, values, mask, discount, trace)
    own = np.flatnonzero(mask)
    for n, t in enumerate(own):
        expected = 0.0
        for k, u in enumerate(own[n:]):
            following = values[own[n + k + 1]] if n + k + 1 < len(own) else 0.0
            expected += (discount * trace) ** k * (rewards[u] + discount * following - values[u])
        assert found[t] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert not found[~mask].any()
    if trace == 1.0:  # the return minus the value
        returns = [sum(discount**k * rewards[u] for k, u in enumerate(own[n:])) for n in range(len(own))]
        np.testing.assert_allclose(found[own], returns - values[own], rtol=1e-12, atol=1e-12)


def test_the_reward_of_the_last_turn_reaches_the_first_one():
    mask = np.array([False, True, True, False, False, True, False])
    rewards = np.array([0.0, 0, 0, 0, 0, 1, 0])
    assert discounted_errors(rewards, np.full(7, 9.0), mask, 1.0, 1.0)[mask].tolist() == [-8.0] * 3
    values = np.where(mask, 0.0, 1e9)  # of observations: never read
    assert discounted_errors(rewards, values, mask, 0.5, 1.0)[mask].tolist() == [0.25, 0.5, 1.0]


def test_lambda_grows_with_the_length_of_the_sample():
    adaptive = resolved(preset="ppo", gaeLengthFactor=0.05)
    assert adaptive.gae_lambda is None and adaptive.value_lambda == 1.0
    assert [lambda_of(adaptive, tokens) for tokens in (0, 1, 20, 100, 1000)] == [0, 0, 0, 0.8, 0.98]
    assert lambda_of(resolved(preset="ppo", gaeLambda=0.9), 1000) == 0.9


def reference_loss(values: Any, old: np.ndarray, targets: np.ndarray, weights: np.ndarray, clip: float) -> Any:
    """Return the loss of tokens, also of complex values."""
    total: Any = 0.0
    for value, before, target, weight in zip(values, old, targets, weights, strict=True):
        errors = [value - target]
        if clip:
            moved = value - before
            near = before + (moved if abs(moved.real) <= clip else np.sign(moved.real) * clip)
            errors.append(near - target)
        total += weight * max((error**2 for error in errors), key=lambda square: square.real) / 2
    return total


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_loss_and_its_gradient_equal_a_reference_in_float64(clip):
    generator = np.random.default_rng(4)
    shape = (3, 9)
    mask = generator.random(shape) > 0.4
    values, old, targets = generator.normal(size=(3, *shape))
    old = values + 0.3 * generator.normal(size=shape)
    weights = generator.random(3)

    class Inputs:
        class tokens:
            mask_BK = torch.from_numpy(mask)

        weights_B = torch.from_numpy(weights)

    def run(values: np.ndarray) -> tuple[float, np.ndarray, dict[str, float]]:
        statistics = ValueStatistics(torch.device("cpu"))
        given = torch.from_numpy(np.where(mask, values, np.nan)).requires_grad_()
        padded = torch.from_numpy(np.where(mask, old, np.nan))
        loss = CriticLoss([Inputs], [padded], [torch.from_numpy(targets * mask)], clip, statistics)(0, given)
        loss.backward()
        return loss.item(), given.grad.numpy(), statistics.metrics(WORLD, 1)

    loss, gradient, metrics = run(values)
    tokens = [array[mask] for array in (values, old, targets, np.broadcast_to(weights[:, None], shape))]
    assert loss == pytest.approx(reference_loss(*tokens, clip), rel=1e-12)
    assert not gradient[~mask].any()
    for n, (b, k) in enumerate(np.argwhere(mask)):
        step = tokens[0].astype(complex)
        step[n] += 1e-30j
        assert gradient[b, k] == pytest.approx(reference_loss(step, *tokens[1:], clip).imag / 1e-30, rel=1e-12)
        moved = [values.copy(), values.copy()]
        moved[0][b, k] += 1e-6
        moved[1][b, k] -= 1e-6
        assert gradient[b, k] == pytest.approx((run(moved[0])[0] - run(moved[1])[0]) / 2e-6, abs=1e-6)
    assert metrics["value_loss"] == loss and metrics["value_mean"] == pytest.approx(tokens[1].mean(), rel=1e-12)
    unexplained = np.var(tokens[2] - tokens[1]) / np.var(tokens[2])
    assert metrics["explained_variance"] == pytest.approx(1 - unexplained, rel=1e-10)
    assert (metrics["value_clip_fraction"] > 0) == (clip > 0)


def test_targets_without_variance_are_not_explained():
    statistics = ValueStatistics(torch.device("cpu"))
    values = torch.tensor([[0.1, 0.2]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    statistics.add(torch.tensor(0.0), ~mask, values, torch.full((1, 2), 1 / 3), mask)
    assert statistics.metrics(WORLD, 1)["explained_variance"] == 0.0


# --- with a model


def make_critic(made: RLJob, backend: FsdpBackend, checkpoint: Path | None = None) -> TrainedCritic[FsdpBackend]:
    sources = {model.name: Path(model.source) for model in made.spec.models}
    critic = load_critic(made.spec.algorithm, made.spec.trainer, sources, sources["policy"], backend, checkpoint)
    assert isinstance(critic, TrainedCritic)
    return critic


def body_and_head(source: str) -> tuple[torch.nn.Module, torch.nn.Linear]:
    """Return a plain critic."""
    body = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).model
    head = torch.nn.Linear(body.config.hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return body, head


def plain_values(body: torch.nn.Module, head: torch.nn.Linear, tokens: SampleTokens, prompt: int) -> torch.Tensor:
    """Return the value of the state before each of the model's tokens."""
    ids = torch.from_numpy(np.frombuffer(tokens.token_ids, np.int32).astype(np.int64))
    return head(body(input_ids=ids[None]).last_hidden_state[0, prompt - 1 : -1]).squeeze(-1)


def plain_steps(made: RLJob, batches: list[tuple[Train, list[SampleTokens]]]) -> tuple[torch.nn.Module, ...]:
    """Return policy, and body and head of the critic, after the batches."""
    algorithm = made.spec.algorithm
    policy = AutoModelForCausalLM.from_pretrained(made.spec.models[0].source, dtype=torch.float32)
    body, head = body_and_head(made.spec.models[-1].source)
    of_critic = [*body.parameters(), *head.parameters()]
    optimizers = (
        torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-3, weight_decay=0),
        torch.optim.AdamW(of_critic, lr=3e-2, eps=1e-3, weight_decay=0),
    )
    for train, shard in batches:
        samples = train.samples

        def of_policy(i: int) -> torch.Tensor:
            return reference_logprobs(policy, shard[i], samples[i].temperature)[samples[i].prompt_tokens - 1 :]  # noqa: B023

        def of_values(i: int) -> torch.Tensor:
            return plain_values(body, head, shard[i], samples[i].prompt_tokens)  # noqa: B023

        with torch.no_grad():
            old = [of_policy(i) for i in range(len(shard))]
            values = [of_values(i) for i in range(len(shard))]
        raw = []
        for sample, own in zip(samples, values, strict=True):
            errors = 0.9 * np.append(own[1:].double().numpy(), 0.0) - own.double().numpy()
            errors[-1] += sample.reward
            places = range(len(errors))
            raw.append(np.array([sum((0.9 * 0.8) ** (u - t) * errors[u] for u in places[t:]) for t in places]))
        tokens = np.concatenate(raw)
        advantages = [(each - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for each in raw]
        for minibatch in split_minibatches([sample.group for sample in samples], algorithm.minibatches):
            loss = value_loss = torch.zeros(())
            count = sum(samples[j].response_tokens for j in minibatch)
            for i in minibatch:
                given, now = torch.from_numpy(advantages[i]).float(), of_policy(i)
                behavior = torch.from_numpy(np.frombuffer(shard[i].logprobs, np.float32).copy())[-len(now) :]
                ratio = (now - old[i]).exp()
                value = torch.minimum(ratio * given, ratio.clamp(0.8, 1.2) * given)
                value = torch.where(given < 0, torch.maximum(value, 3 * given), value)
                loss = loss - (value * (old[i] - behavior).exp().clamp(max=2)).sum() / count
                target = (values[i].double() + torch.from_numpy(raw[i])).float()
                current = of_values(i)
                near = values[i] + (current - values[i]).clamp(-0.05, 0.05)
                squares = torch.maximum((current - target) ** 2, (near - target) ** 2)
                value_loss = value_loss + 0.5 * squares.sum() / count
            for optimizer, total, bound in zip(optimizers, (loss, value_loss), (0.05, 0.5), strict=True):
                optimizer.zero_grad()
                total.backward()
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], bound)
                optimizer.step()
    return policy, body, head


def weights_of(critic: TrainedCritic[FsdpBackend]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in critic.network.named_tensors()}


@pytest.mark.parametrize("budget", [10_000, 20])
def test_steps_of_policy_and_critic_are_those_of_plain_torch(world, job, model_directory, tmp_path, batch, budget):
    models = [
        {"name": "policy", "source": str(model_directory)},
        {"name": "other", "source": str(noisy_copy(model_directory, tmp_path / "other"))},
    ]
    made = job(algorithm=PPO | {"criticModel": "other"}, models=models, trainer=TRAINER)
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    critic = make_critic(made, backend)
    batches = [batch(seed, step=seed) for seed in range(3)]
    results = [apply(world, backend, made.spec.algorithm, *each, budget, critic=critic).metrics for each in batches]
    policy, body, head = plain_steps(made, batches)
    expected = {f"model.{name}": tensor for name, tensor in body.named_parameters()}
    expected |= {f"lm_head.{name}": tensor for name, tensor in head.named_parameters()}
    found = weights_of(critic)
    assert found.keys() == expected.keys()
    before = weights_of(make_critic(made, backend))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-4, atol=2e-5)
        assert not torch.equal(found[name], before[name]), name
    for name, tensor in backend.named_tensors():
        torch.testing.assert_close(tensor, dict(policy.named_parameters())[name].detach(), rtol=1e-4, atol=2e-6)
    assert results[0]["value_mean"] == 0 and abs(results[2]["value_mean"]) > 1e-3
    assert results[2]["critic_grad_norm"] > 0.01 and results[2]["value_clip_fraction"] > 0
    assert results[2]["critic_learning_rate"] == 3e-2 and results[2]["learning_rate"] == 1e-3
    assert results[2]["seconds_critic"] > 0


def test_a_critic_of_several_turns_counts_values_at_the_models_tokens_only(world, job, model_directory):
    """Values are those before the tokens: of the prompt's last token, and of the observation's last token."""
    made = job(algorithm=PPO, trainer=TRAINER)
    critic = make_critic(made, FsdpBackend(model_directory, made.spec.trainer, world))
    body, head = body_and_head(made.spec.models[0].source)
    with torch.no_grad():
        head.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
        head.bias.fill_(0.25)
        for name, tensor in head.named_parameters():
            critic.network._parameters[f"lm_head.{name}"].to_local().copy_(tensor)
    mask = np.array([False, False, True, True, False, True])
    rows = [Row(np.arange(6), np.zeros(6, np.float32), mask, np.zeros(6))]
    rows.append(Row(np.arange(9), np.zeros(9, np.float32), np.arange(9) > 3, np.zeros(9)))
    microbatch = collate(rows, [0.8, 1.0], world.device)
    (values_BK,) = critic.run([microbatch], None)
    assert values_BK.shape == microbatch.mask_BK.shape and not values_BK.requires_grad
    for b, row in enumerate(rows):
        expected = head(body(input_ids=torch.from_numpy(row.token_ids_L)[None]).last_hidden_state[0]).squeeze(-1)
        places = np.flatnonzero(row.mask_L)
        found = values_BK[b, places - microbatch.first]
        torch.testing.assert_close(found, expected.detach()[places - 1], rtol=0, atol=1e-5)


def values_and_gradients(critic: TrainedCritic[FsdpBackend]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the values at the model's tokens of rows of different lengths, and the gradients of a loss of them, in
    float64."""
    network = critic.network
    network.model.double()
    with torch.no_grad():
        layer = torch.randn(1, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        network.model.lm_head.weight.copy_(layer)
    generator, rows = np.random.default_rng(1), []
    for length in (17, 12, 3, 1, 9):
        ids = generator.integers(0, 61, length)
        rows.append(Row(ids, np.zeros(length, np.float32), np.arange(length) > 3, np.zeros(length)))
    microbatch = collate(rows, [1.0] * len(rows), torch.device("cpu"))
    weights_BK = torch.from_numpy(generator.normal(size=microbatch.mask_BK.shape))
    (values_BK,) = critic.run([microbatch], lambda _, v_BK: (v_BK.where(microbatch.mask_BK, 0) * weights_BK).sum())
    assert values_BK.shape == microbatch.mask_BK.shape and values_BK.dtype == torch.float64
    return values_BK.where(microbatch.mask_BK, 0.0), network.gradients()


def test_a_critic_of_packed_rows_has_the_values_and_gradients_of_padded_rows(world, job, model_directory):
    results = {}
    for packing in ("none", "varlen"):
        made = job(algorithm=PPO, trainer=TRAINER | {"packing": packing})
        critic = make_critic(made, FsdpBackend(model_directory, made.spec.trainer, world))
        assert critic.network.packs == (packing == "varlen")
        results[packing] = values_and_gradients(critic)
    (expected, gradients), (found, of_packed) = results["none"], results["varlen"]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert of_packed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(of_packed[name] / scale, gradient / scale, rtol=0, atol=1e-6, msg=name)


def test_only_the_critic_is_trained_in_its_first_steps(world, job, model_directory, batch):
    made = job(algorithm=PPO | {"criticWarmupSteps": 2}, trainer=TRAINER)
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    critic = make_critic(made, backend)
    changed = []
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in backend.named_tensors()}, weights_of(critic)
        metrics = apply(world, backend, made.spec.algorithm, *batch(step, step=step), 30, critic=critic).metrics
        after = dict(backend.named_tensors()), weights_of(critic)
        changed.append([any(not torch.equal(b[n], a[n]) for n in b) for b, a in zip(before, after, strict=True)])
        warm = step < 2
        assert (metrics["grad_norm"] == 0, metrics["learning_rate"] == 0) == (warm, warm)
        assert metrics["tokens"] > 0 and metrics["logprob_diff_mean"] > 0 and metrics["updates_skipped"] == 0
    assert changed == [[False, True], [False, True], [True, True]]
    assert (backend.updates, critic.network.updates) == (2, 6)


def resumed(world: World, made: RLJob, source: Path, storage: Path, steps: list[Any], first: int) -> Any:
    """Return the tensors of policy and critic after the steps from ``first``, and after a checkpoint was written."""
    checkpoint = CheckpointStore(storage).path(first) if first else None
    backend = FsdpBackend(checkpoint or source, made.spec.trainer, world)
    if checkpoint:
        backend.load(checkpoint)
    critic = make_critic(made, backend, checkpoint)
    for step in range(first, len(steps)):
        apply(world, backend, made.spec.algorithm, *steps[step], 30, critic=critic)
        if step == 1 and not first:
            saved = backend.save()
            saved = SavedState(saved.weights, saved.optimizer | critic.save())
            state = TrainerState(2, backend.updates, 1, {}, {})
            CheckpointStore(storage).write(world.with_own_control(), state, read_configuration(source), saved)
    tensors = {name: tensor.numpy().copy() for name, tensor in backend.named_tensors()}
    tensors |= {f"critic {name}": tensor.numpy().copy() for name, tensor in critic.network.named_tensors()}
    return tensors, critic.network.updates


def test_a_checkpoint_has_the_critic_and_resumes_to_the_same_bits_on_other_ranks_nearly(
    job, model_directory, batch, tmp_path
):
    made = job(algorithm=PPO | {"criticWarmupSteps": 1}, trainer=TRAINER)
    steps = [batch(seed, step=seed) for seed in range(4)]
    (whole,) = on_ranks(1, resumed, made, model_directory, tmp_path, steps, 0)
    checkpoint = CheckpointStore(tmp_path).path(2)
    stored = load_file(checkpoint / "trainer" / "optimizer.safetensors")
    names = {name.removeprefix("critic.weight.") for name in stored if name.startswith("critic.weight.")}
    assert names == {name.removeprefix("critic ") for name in whole[0] if name.startswith("critic ")}
    assert int(stored["critic.updates"]) == 4 and whole[1] == 8
    assert find_damage(checkpoint, read_state(checkpoint).files) == ""
    assert not any("critic" in name for name in load_file(checkpoint / "model.safetensors"))
    (again,) = on_ranks(1, resumed, made, model_directory, tmp_path, steps, 2)
    assert again[1] == whole[1] and again[0].keys() == whole[0].keys()
    for name, tensor in whole[0].items():
        np.testing.assert_array_equal(again[0][name], tensor, err_msg=name)
    for other in on_ranks(3, resumed, made, model_directory, tmp_path, steps, 2):
        for name, tensor in whole[0].items():
            np.testing.assert_allclose(other[0][name], tensor, rtol=0, atol=1e-5, err_msg=name)
    parts = tmp_path / "parts"
    on_ranks(2, resumed, made, model_directory, parts, steps[:2], 0)
    (of_two,) = on_ranks(1, resumed, made, model_directory, parts, steps, 2)
    for name, tensor in whole[0].items():
        np.testing.assert_allclose(of_two[0][name], tensor, rtol=0, atol=1e-5, err_msg=name)


def test_the_head_of_a_model_with_an_own_output_layer_is_replaced(world, job, tmp_path):
    config = AutoConfig.for_model(
        "gemma2", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, final_logit_softcapping=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    made = job(models=[{"name": "policy", "source": str(tmp_path)}], algorithm=PPO, trainer={"dtype": "bfloat16"})
    critic = make_critic(made, FsdpBackend(tmp_path, made.spec.trainer, world))
    shapes = {name: tuple(tensor.shape) for name, tensor in critic.network.named_tensors() if "lm_head" in name}
    assert shapes == {"lm_head.weight": (1, 32), "lm_head.bias": (1,)}
    with torch.no_grad():
        critic.network._parameters["lm_head.bias"].to_local().fill_(20.015625)
    microbatch = collate(
        [Row(np.arange(5), np.zeros(5, np.float32), np.arange(5) > 1, np.zeros(5))], [1.0], world.device
    )
    (values_BK,) = critic.run([microbatch], None)
    assert values_BK.dtype == torch.float32 and values_BK.tolist() == [[20.0] * 3], "20 in bfloat16, and not capped"


def test_a_gradient_of_the_critic_that_is_not_finite_is_skipped_and_counted(world, job, model_directory, batch):
    trainer = TRAINER | {"criticOptimizer": TRAINER["criticOptimizer"] | {"maxSkippedUpdates": 2}}
    made = job(algorithm=PPO | {"minibatches": 1}, trainer=trainer)
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    critic = make_critic(made, backend)
    checks = StepChecks.of(made.spec)
    run, before = critic.run, weights_of(critic)

    def infinite(microbatches: Any, loss: Any) -> Any:
        return run(microbatches, loss and (lambda i, values_BK: loss(i, values_BK) * float("inf")))

    critic.run = infinite  # type: ignore[method-assign]
    metrics = apply(world, backend, made.spec.algorithm, *batch(0), 90, critic=critic, checks=checks).metrics
    assert metrics["critic_updates_skipped"] == 1 and metrics["updates_skipped"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(critic).items())
    with pytest.raises(UnrecoverableError, match=r"of the critic was not finite .*trainer.criticOptimizer.maxSk"):
        apply(world, backend, made.spec.algorithm, *batch(1, step=1), 90, critic=critic, checks=checks)


@requires(values=True)
def above_values(inputs):
    values = inputs.scores.values_by_row()
    return {i: np.full(len(row.mask_L), inputs.rewards_N[i]) - values[i] for i, row in inputs.rows.items()}


def test_an_advantage_of_a_user_gets_a_critic_that_learns_returns(world, job, model_directory, batch, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(above_values=above_values))
    own = {"advantage": "mine:above_values", "criticModel": "policy", "valueClip": 0}
    made = job(algorithm=own, trainer={"criticOptimizer": {"learningRate": 3e-3}})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    critic = make_critic(made, backend)
    train, tokens = batch()
    for sample, each in zip(train.samples, tokens, strict=True):
        sample.reward = each.segments[-1].reward = 1.0
    results = [
        apply(world, backend, made.spec.algorithm, replace(train, step=step), tokens, 90, critic=critic)
        for step in range(8)
    ]
    assert results[0].advantages_N.tolist() == [1.0] * 12, "the values of a new critic are 0"
    means = [result.metrics["value_mean"] for result in results]
    assert means == sorted(means) and means[-1] > 0.3
    assert results[-1].advantages_N.mean() == pytest.approx(1 - means[-1], abs=0.1)
    losses = [result.metrics["value_loss"] for result in results]
    assert losses[0] == pytest.approx(0.5, rel=1e-5) and losses[-1] < 0.5 * losses[0]


def test_what_cannot_have_a_critic_is_refused(job, model_directory, tmp_path, world):
    made = job(algorithm=PPO)
    backend: Any = SimpleNamespace(vocabulary=61)
    with pytest.raises(ModelError, match=r"^spec.trainer.backend: SimpleNamespace trains no critic.*; set fsdp"):
        make_critic(made, backend)
    assert load_critic(job().spec.algorithm, made.spec.trainer, {}, model_directory, backend, None) is None
    plain = FsdpBackend(model_directory, made.spec.trainer, world)
    state = TrainerState(1, 1, 1, {}, {})
    CheckpointStore(tmp_path).write(world, state, read_configuration(model_directory), plain.save())
    with pytest.raises(ModelError, match=r"^critic.updates cannot be read"):
        make_critic(made, plain, CheckpointStore(tmp_path).path(1))
