"""A step against plain torch: one model, one sample at a time, no padding, no sharding."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_steps import OF_OTHERS, apply, gradients_of, reference_logprobs
from transformers import AutoModelForCausalLM

from rljob.api.algorithm import Algorithm
from rljob.api.models import RLJob
from rljob.api.roles import Optimizer
from rljob.protocol.batch_samples import SampleTokens, Segment
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.base import per_batch
from rljob.trainer.algorithms.needs import requires
from rljob.trainer.algorithms.objectives.base import Objective, zero_without_advantage
from rljob.trainer.algorithms.objectives.ppo_clip import ppo_clip
from rljob.trainer.algorithms.token_selection import selects
from rljob.trainer.backends.base import OptimizerUpdate
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch_plan import split_minibatches
from rljob.trainer.errors import ModelError, UnrecoverableError
from rljob.trainer.metrics import METRICS
from rljob.trainer.process_group import World
from rljob.trainer.step import StepResult, plan_step
from rljob.trainer.step_checks import StepChecks
from rljob.trainer.weight_probe import probe, probe_tokens
from rljob.transfer.packed_weights import pack

TOLERANCE = 1e-6


def reference_advantage(algorithm: Algorithm, rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    if algorithm.advantage == "group_centered":
        return [reward - mean for reward in rewards]
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (variance**0.5 + 1e-6) for reward in rewards]


def reference_advantages(algorithm: Algorithm, train: Train) -> list[float]:
    result = []
    for sample in train.samples:
        members = [other for other in train.samples if other.group == sample.group]
        values = reference_advantage(algorithm, [other.reward for other in members])
        result.append(values[[other.sample for other in members].index(sample.sample)])
    return result


def reference_shaping(algorithm: Algorithm, train: Train) -> Train:
    """Return the batch with the rewards minus the punishment of long answers."""
    if algorithm.overlong_buffer is None:
        return train
    buffer, samples = algorithm.overlong_buffer, []
    for sample in train.samples:
        excess = (sample.response_tokens - (sample.max_tokens - buffer)) / buffer
        punishment = algorithm.overlong_penalty * min(max(excess, 0), 1)
        samples.append(msgspec.structs.replace(sample, reward=sample.reward - punishment))
    return msgspec.structs.replace(train, samples=samples)


def reference_entropy(model: torch.nn.Module, tokens: SampleTokens, temperature: float) -> torch.Tensor:
    ids = torch.from_numpy(np.frombuffer(tokens.token_ids, np.int32).astype(np.int64))
    return torch.distributions.Categorical(logits=model(input_ids=ids[None]).logits[0, :-1] / temperature).entropy()


def reference_training(
    source: str, steps: list[tuple[Train, list[SampleTokens]]], algorithm: Algorithm, settings: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a plain model; return its parameters and the last gradient before clipping."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    for given, shard in steps:
        train = reference_shaping(algorithm, given)
        groups = [sample.group for sample in train.samples]
        advantages = reference_advantages(algorithm, train)
        with torch.no_grad():
            old = [reference_logprobs(model, t, s.temperature) for t, s in zip(shard, train.samples, strict=True)]
        for minibatch in split_minibatches(groups, algorithm.minibatches):
            total = torch.zeros(())
            divisor = sum(train.samples[i].response_tokens for i in minibatch)
            positive = sum(train.samples[i].response_tokens for i in minibatch if train.samples[i].reward > 0)
            for i in minibatch:
                sample = train.samples[i]
                advantage = advantages[i]
                logprobs = reference_logprobs(model, shard[i], sample.temperature)[sample.prompt_tokens - 1 :]
                behavior = torch.from_numpy(np.frombuffer(shard[i].logprobs, np.float32).copy())[sample.prompt_tokens :]
                before = old[i][sample.prompt_tokens - 1 :]
                ratio = (logprobs - (behavior if algorithm.ratio == "behavior" else before)).exp()
                clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                objective = torch.minimum(ratio * advantage, clipped * advantage)
                if advantage < 0 and algorithm.dual_clip:
                    objective = objective.clamp(min=algorithm.dual_clip * advantage)
                if algorithm.correction == "tis":
                    objective = objective * (before - behavior).exp().clamp(max=algorithm.correction_cap)
                if algorithm.entropy_coefficient:
                    entropy = reference_entropy(model, shard[i], sample.temperature)[sample.prompt_tokens - 1 :]
                    objective = objective + algorithm.entropy_coefficient * entropy
                objective = objective.sum()
                if algorithm.aggregation == "seq_mean_token_sum_norm":
                    objective = objective * divisor / (len(minibatch) * sample.max_tokens)
                total = total - objective / divisor
                if algorithm.positive_coefficient and sample.reward > 0:
                    total = total - algorithm.positive_coefficient * logprobs.sum() / positive
            optimizer.zero_grad()
            total.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, gradients


def train_steps(
    backend: FsdpBackend, world: World, job: RLJob, steps: list[tuple[Train, list[SampleTokens]]]
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Apply the batches; return the last step and the last gradient before clipping."""
    gradients = gradients_of(backend)
    for train, shard in steps:
        result = apply(world, backend, job.spec.algorithm, train, shard, job.spec.trainer.microbatch_tokens)
    return result, gradients


UNCORRECTED = {"ratio": "behavior", "correction": "none"}
ALGORITHMS = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "minibatches": {"preset": "grpo", "minibatches": 3, "clipHigh": 0.28},
    "behavior": {**UNCORRECTED, "minibatches": 4},
}
BONUSES = {
    "entropy": {"entropyCoefficient": 0.3, "minibatches": 2},
    "positive": {"positiveCoefficient": 0.3, "minibatches": 2, "overlongBuffer": 10, "overlongPenalty": 3},
}
"""Algorithms that compute samples without an advantage; a long answer has no positive reward."""
# Gradients of key biases are only rounding, which AdamW would amplify: a large epsilon keeps the comparison meaningful.
OPTIMIZER = {"learningRate": 1e-3, "maxGradNorm": 0.05, "weightDecay": 0.1, "epsilon": 1e-3}


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *BONUSES])
def test_two_steps_give_the_gradients_and_parameters_of_plain_torch(
    model_directory, world, job, batch, algorithm, budget
):
    fields = (ALGORITHMS | BONUSES)[algorithm]
    made = job(algorithm=fields, trainer={"microbatchTokens": budget, "optimizer": OPTIMIZER})
    steps = [batch(seed, step=seed) for seed in range(2)]
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    result, gradients = train_steps(backend, world, made, steps)
    assert ("entropy" in result.metrics) == (algorithm == "entropy")
    parameters, expected = reference_training(
        str(model_directory), steps, made.spec.algorithm, made.spec.trainer.optimizer
    )
    for name, tensor in backend.named_tensors():
        torch.testing.assert_close(gradients[name], expected[name], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(tensor, parameters[name], rtol=0, atol=TOLERANCE)


def as_sampled(source: str, train: Train, shard: list[SampleTokens], error: float = 0.0) -> list[SampleTokens]:
    """Return the shard with the model's log-probabilities as the engine's, off by ``error`` in one token."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    result = []
    for tokens, sample in zip(shard, train.samples, strict=True):
        with torch.no_grad():
            values = np.concatenate([[0], reference_logprobs(model, tokens, sample.temperature).numpy()])
        values[: sample.prompt_tokens] = 0
        result.append(msgspec.structs.replace(tokens, logprobs=values.astype("<f4").tobytes()))
    wrong = np.frombuffer(result[-1].logprobs, np.float32).copy()
    wrong[-1] += error
    result[-1] = msgspec.structs.replace(result[-1], logprobs=wrong.tobytes())
    return result


def first_step(model_directory, world, made, batch, error, step=0, version=0):
    train, shard = batch(step=step)
    for sample in train.samples:
        sample.min_version = version
    train = msgspec.structs.replace(train, check_initial_logprobs=step == 0)
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    sampled = as_sampled(str(model_directory), train, shard, error)
    checks = StepChecks.of(made.spec)
    try:
        return apply(world, backend, made.spec.algorithm, train, sampled, 60, True, checks).metrics
    except UnrecoverableError:
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())
        raise


@pytest.mark.parametrize("minibatches", [1, 2])
def test_at_the_first_step_engine_and_trainer_agree(model_directory, world, job, batch, minibatches):
    metrics = first_step(model_directory, world, job(algorithm={"minibatches": minibatches}), batch, 0.0)
    assert metrics["first_step_logprob_error"] < 1e-5
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["ess"] == pytest.approx(1)
    if minibatches == 1:
        assert metrics["clip_fraction"] == 0


def test_a_first_step_with_other_log_probabilities_ends_the_run_before_weights_change(
    model_directory, world, job, batch
):
    with pytest.raises(UnrecoverableError, match=r"differ from the trainer's by up to 3\.0"):
        first_step(model_directory, world, job(), batch, 3e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_computes_other_log_probabilities_ends_the_run_at_any_step(
    model_directory, world, job, batch, dtype
):
    made = job(trainer={"dtype": dtype}, rollouts=[{"name": "main", "maxModelLength": 512, "dtype": dtype}])
    bound = 0.03 if dtype == "bfloat16" else 1e-4
    assert made.spec.logprob_tolerance.mean == bound
    if dtype == "bfloat16":  # one token may differ
        assert first_step(model_directory, world, made, batch, 0.9)["first_step_logprob_error"] > 0.8
    for step, version in ((0, 0), (7, 7)):
        first_step(model_directory, world, made, batch, 0.0, step, version)
        with pytest.raises(UnrecoverableError, match=rf"tokens of version {version} .*Tolerance.* {bound:g};|up to"):
            first_step(model_directory, world, made, batch, -20.0, step, version)
    first_step(model_directory, world, made, batch, -20.0, 7, 6)  # older weights may differ by any amount


def test_the_engine_is_compared_on_all_minibatches_whose_old_log_probabilities_are_known(
    model_directory, world, job, batch
):
    made = job(algorithm={"minibatches": 2})
    train, shard = batch(step=7)
    for sample in train.samples:
        sample.min_version = 7
    for error in (0.0, -20.0):  # of the last sample, which is in the second minibatch
        sampled = as_sampled(str(model_directory), train, shard, error)
        backend, checks = FsdpBackend(model_directory, made.spec.trainer, world), StepChecks.of(made.spec)
        if error:
            with pytest.raises(UnrecoverableError, match="tokens of version 7 differ"):
                apply(world, backend, made.spec.algorithm, train, sampled, 60, True, checks)
        else:
            apply(world, backend, made.spec.algorithm, train, sampled, 60, True, checks)


def test_the_guard_compares_tokens_of_the_current_version_of_the_first_and_of_all_minibatches(
    model_directory, world, job, batch
):
    train, shard = batch(step=7)
    for i, sample in enumerate(train.samples):
        sample.min_version = 7 - i % 2
    made = job(algorithm={"minibatches": 2})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    with mock.patch.object(StepChecks, "compare") as compare:
        apply(world, backend, made.spec.algorithm, train, shard, 60, True)
    first, second = split_minibatches([sample.group for sample in train.samples], 2)
    for call, compared in zip(compare.call_args_list, (first, [*first, *second]), strict=True):
        found = call.args[0]
        errors = []
        for indices in (compared, [i for i in compared if i % 2 == 0]):
            old, behavior = flat(train, shard, str(model_directory), indices)
            errors.append((old - behavior).abs())
        whole, current = errors
        assert found.tokens == len(current) < len(whole) and current.max() < whole.max()
        assert (found.mean, found.largest) == pytest.approx((float(current.mean()), float(current.max())), rel=1e-5)


def test_bfloat16_keeps_float32_weights(model_directory, world, job, batch):
    made = job(trainer={"dtype": "bfloat16", "optimizer": {"learningRate": 1e-6}})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    train_steps(backend, world, made, [batch()])
    changes = {name: (tensor - before[name]).abs().max().item() for name, tensor in backend.named_tensors()}
    assert all(tensor.dtype == torch.float32 for tensor in before.values())
    assert 0 < max(changes.values()) < 1e-5  # smaller than a bfloat16 could hold


def test_a_gradient_that_is_not_finite_is_skipped_and_ends_the_run_after_three_in_a_row(
    model_directory, world, job, batch, caplog
):
    made = job(algorithm={"advantage": "group_centered"})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    checks = StepChecks.of(made.spec)

    def step(reward: float) -> dict[str, float]:
        train, shard = batch()
        train.samples[0].reward = shard[0].segments[-1].reward = reward
        return apply(world, backend, made.spec.algorithm, train, shard, 60, checks=checks).metrics

    def state() -> dict[str, torch.Tensor]:
        saved = backend.save()
        return {name: tensor.clone() for name, tensor in [*saved.weights.items(), *saved.optimizer.items()]}

    assert step(1.0)["updates_skipped"] == 0
    for _ in range(2):
        before = state()
        metrics = step(1e30)  # finite, but not its square
        assert (
            metrics["updates_skipped"] == 1
            and np.isnan(metrics["grad_norm"])
            and checks.skipped_in_a_row == {"optimizer": 1}
        )
        assert "step 0: update 0 was skipped: the gradient norm is inf" in caplog.text
        assert all(torch.equal(tensor, before[name]) for name, tensor in state().items()) and backend.updates == 1
        checks.count_update(OptimizerUpdate(1.0, 1.0), 0, 0)
    step(1e30)
    step(1e30)
    sentence = r"in 3 updates in a row \(spec\.trainer\.optimizer\.maxSkippedUpdates\), now inf; lower .*learningRate"
    with pytest.raises(UnrecoverableError, match=sentence):
        step(1e30)


@pytest.mark.parametrize("limit", [1, 4])
def test_the_run_ends_at_the_given_number_of_skipped_updates_in_a_row(job, limit):
    checks = StepChecks.of(job(trainer={"optimizer": {"maxSkippedUpdates": limit}}).spec)
    skipped = OptimizerUpdate(float("nan"), 1.0, skipped=True)
    for _ in range(2):  # an applied update ends the row
        for number in range(limit - 1):
            checks.count_update(skipped, 0, number)
        checks.count_update(OptimizerUpdate(1.0, 1.0), 0, limit)
    for number in range(limit - 1):
        checks.count_update(skipped, 0, number)
    with pytest.raises(UnrecoverableError, match=f"in {limit} updates in a row .* or raise maxSkippedUpdates"):
        checks.count_update(skipped, 0, limit)


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({**UNCORRECTED, "minibatches": 3}, 0),
        ({**UNCORRECTED, "ratio": "proximal", "minibatches": 3}, 2),
        ({"minibatches": 1}, 0),
        ({"minibatches": 3}, 2),
        ({**UNCORRECTED, "veto_below": 1e-4, "minibatches": 3}, 2),
        ({**UNCORRECTED, "minibatches": 3, "advantage": "mine:advantage"}, 3),
        ({**UNCORRECTED, "minibatches": 3, "objective": "mine:objective"}, 2),
        ({**UNCORRECTED, "minibatches": 3, "objective": "mine:selecting"}, 3),
    ],
)
def test_old_log_probabilities_cost_a_pass_only_where_something_needs_them(
    model_directory, world, job, batch, monkeypatch, fields, passes
):
    mine = SimpleNamespace(
        advantage=requires(old=True)(lambda inputs: inputs.scores.old_by_row()),
        objective=requires(old=True)(lambda inputs: ppo_clip(inputs)),
        selecting=selects(lambda inputs: inputs.keys_T < 0.5)(lambda inputs: ppo_clip(inputs)),
    )
    monkeypatch.setitem(sys.modules, "mine", mine)
    made = job()
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    run, forward = backend.run, []

    def counted(microbatches, loss):
        forward.extend([] if loss else [len(microbatches)])
        return run(microbatches, loss)

    backend.run = counted
    train, shard = batch()
    algorithm = made.spec.algorithm.model_copy(update=fields)
    metrics = apply(world, backend, algorithm, train, shard, 10_000, all_samples=True).metrics
    assert len(forward) == passes
    minibatches = split_minibatches([sample.group for sample in train.samples], algorithm.minibatches)
    known = minibatches if passes or len(minibatches) == 1 else minibatches[:1]
    old, behavior = flat(train, shard, str(model_directory), [i for minibatch in known for i in minibatch])
    assert metrics["logprob_diff_mean"] == pytest.approx(float((old - behavior).abs().mean()), rel=1e-5)


def test_an_objective_that_reads_old_log_probabilities_without_a_declaration_is_refused(
    model_directory, world, job, batch, monkeypatch
):
    monkeypatch.setitem(
        sys.modules, "mine", SimpleNamespace(objective=lambda inputs: (inputs.old_BK, ppo_clip(inputs))[1])
    )
    made = job(algorithm={**UNCORRECTED, "minibatches": 2})
    algorithm = made.spec.algorithm.model_copy(update={"objective": "mine:objective"})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    with pytest.raises(UnrecoverableError, match=r"mine:objective failed: .*@requires\(old=True\), or set ratio"):
        apply(world, backend, algorithm, *batch(), 60)


def test_each_step_has_other_random_numbers_for_a_selection(model_directory, world, job, batch, monkeypatch):
    seen = []

    def nothing(inputs):
        seen.append(inputs.keys_T.tolist())
        return inputs.keys_T < 0

    monkeypatch.setitem(
        sys.modules, "mine", SimpleNamespace(objective=selects(nothing)(lambda inputs: ppo_clip(inputs)))
    )
    made = job()
    algorithm = made.spec.algorithm.model_copy(update={"objective": "mine:objective"})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    for step in (0, 1, 0):
        apply(world, backend, algorithm, *batch(step=step), 10_000, all_samples=True)
    assert seen[0] == seen[2] and not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (
            selects(lambda inputs: inputs.keys_T)(lambda inputs: ppo_clip(inputs)),
            "has shape .* type float64, not shape .* bool",
        ),
        (selects(lambda inputs: inputs.keys_T[:1] < 1)(lambda inputs: ppo_clip(inputs)), r"has shape \(1,\)"),
        (lambda inputs: (inputs.selected_BK, ppo_clip(inputs))[1], "no tokens are selected; declare @selects"),
    ],
)
def test_an_objective_with_a_wrong_selection_is_refused(
    model_directory, world, job, batch, monkeypatch, objective, sentence
):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(objective=objective))
    made = job()
    algorithm = made.spec.algorithm.model_copy(update={"objective": "mine:objective"})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    with pytest.raises(UnrecoverableError, match=rf"mine:objective failed: ValueError: .*{sentence}"):
        apply(world, backend, algorithm, *batch(), 60)


def flat(train: Train, shard: list[SampleTokens], source: str, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return l_old and l_mu of the response tokens of these samples, sample by sample, from a plain model."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    old, behavior = [], []
    for tokens, sample in ((shard[i], train.samples[i]) for i in indices):
        with torch.no_grad():
            old.append(reference_logprobs(model, tokens, sample.temperature).double()[sample.prompt_tokens - 1 :])
        behavior.append(torch.from_numpy(np.frombuffer(tokens.logprobs, np.float32).copy())[sample.prompt_tokens :])
    return torch.cat(old), torch.cat(behavior).double()


def test_the_metrics_equal_those_of_a_plain_model(model_directory, world, job, batch):
    train, shard = batch()
    for sample, tokens in zip(train.samples[:3], shard, strict=False):
        sample.reward = tokens.segments[-1].reward = 1.0
    algorithm = {**UNCORRECTED, "dualClip": 0}
    made = job(trainer={"microbatchTokens": 60, "optimizer": OPTIMIZER}, algorithm=algorithm)
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    of_sample = torch.tensor(reference_advantages(made.spec.algorithm, train), dtype=torch.float64)
    trained = [i for i in range(len(shard)) if of_sample[i] != 0]
    assert 0 < len(trained) < len(shard)
    old, behavior = flat(train, shard, str(model_directory), trained)
    log_ratio, ratio = old - behavior, (old - behavior).exp()
    lengths = torch.tensor([train.samples[i].response_tokens for i in trained])
    advantage = of_sample[trained].repeat_interleave(lengths)
    low, high = (advantage < 0) & (ratio < 0.8), (advantage > 0) & (ratio > 1.2)
    real = sum(len(shard[i].loss_mask) for i in trained)
    (microbatches,) = plan_step(train, made.spec.algorithm, world, 60).microbatches
    padded = sum(len(samples) * max(len(shard[i].loss_mask) for i in samples) for samples in microbatches)
    tokens = sum(sample.response_tokens for sample in train.samples)
    result, gradients = train_steps(backend, world, made, [(train, shard)])
    metrics = result.metrics
    expected = {
        "loss": -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens,
        "grad_norm": torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt(),
        "learning_rate": 1e-3,
        "tokens": len(old),
        "samples": len(shard),
        "samples_trained": len(trained),
        "advantage_abs": of_sample.abs().mean(),
        "zero_advantage_fraction": (of_sample == 0).double().mean(),
        "training_log_ppl": -old.mean(),
        "updates_skipped": 0,
        "logprob_diff_mean": log_ratio.abs().mean(),
        "logprob_diff_max": log_ratio.abs().max(),
        "kl_k1": -log_ratio.mean(),
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "ess": ratio.sum() ** 2 / (len(old) * ratio.square().sum()),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_distance": (ratio - 1).abs().mean(),
        "clip_fraction": (low | high).double().mean(),
        "clip_fraction_low": low.double().mean(),
        "clip_fraction_high": high.double().mean(),
        "correction_mean": 1,
        "masked_fraction": 0,
        "padding_fraction": (padded - real) / padded,
        "lockstep": padded / real,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name
    assert expected["clip_fraction_low"] > 0 and expected["clip_fraction_high"] > 0 and expected["padding_fraction"] > 0
    rest = {"seconds_forward", "seconds_backward", "seconds_optimizer", "memory_peak_bytes"}
    of_the_loop = {"entropy", "seconds", "seconds_pull", "tokens_per_second", "first_step_logprob_error"}
    assert metrics.keys() == expected.keys() | rest == METRICS.keys() - of_the_loop - OF_OTHERS
    assert all(metrics[name] > 0 for name in rest)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reported_advantages_are_the_used_ones(model_directory, world, job, batch, algorithm):
    made = job(algorithm=ALGORITHMS[algorithm], trainer={"microbatchTokens": 60})
    train, shard = batch()
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    result, _ = train_steps(backend, world, made, [(train, shard)])
    assert result.advantages_N.dtype == np.float32
    np.testing.assert_allclose(result.advantages_N, reference_advantages(made.spec.algorithm, train), rtol=1e-6)


CONSTANT = [1.0] * 6 + [0.1] * 6
"""Rewards of four groups of three, all equal: the mean of the last groups is not exactly 0.1."""


@pytest.mark.parametrize("budget", [20, 60])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "constant"])
def test_samples_without_an_advantage_are_not_computed_and_change_nothing(
    model_directory, world, job, batch, algorithm, budget
):
    """Weights and moments of three steps, of which one has minibatches without any trained sample."""
    made = job(
        algorithm=ALGORITHMS.get(algorithm, ALGORITHMS["behavior"]),
        trainer={"optimizer": OPTIMIZER},
    )
    saved, results = [], []
    for all_samples in (False, True):
        backend = FsdpBackend(model_directory, made.spec.trainer, world)
        for step in range(3):
            train, shard = batch(step, step=step)
            if step == 1:
                rewards = CONSTANT if algorithm == "constant" else [0.0, 1.0, 1.0, *CONSTANT[3:]]
                for sample, tokens, reward in zip(train.samples, shard, rewards, strict=True):
                    sample.reward = tokens.segments[-1].reward = reward
            result = apply(world, backend, made.spec.algorithm, train, shard, budget, all_samples)
            if step == 1:
                results.append(result)
        state = backend.save()
        saved.append(state.weights | state.optimizer)
    assert results[0].metrics["samples_trained"] == (0 if algorithm == "constant" else 3)
    assert results[1].metrics["samples_trained"] == results[0].metrics["samples"] == 12
    assert results[0].advantages_N.tobytes() == results[1].advantages_N.tobytes()
    for name in ("loss", "grad_norm", "zero_advantage_fraction"):
        assert results[0].metrics[name] == pytest.approx(results[1].metrics[name], rel=1e-4, abs=1e-7), name
    for name, tensor in saved[0].items():
        torch.testing.assert_close(tensor, saved[1][name], rtol=0, atol=1e-7)


def test_samples_without_an_advantage_are_computed_if_something_needs_them(job, world, batch, monkeypatch):
    train, _ = batch()
    for sample in train.samples:
        sample.reward = 1.0
    algorithm = job().spec.algorithm
    mine = SimpleNamespace(
        objective=lambda inputs: None,  # may have an entropy bonus
        bonus=requires(entropy=True)(zero_without_advantage(lambda inputs: None)),
        multiple=zero_without_advantage(lambda inputs: None),
        advantage=per_batch(lambda inputs: inputs.rewards_N),
    )
    monkeypatch.setitem(sys.modules, "mine", mine)

    def trained(train: Train, **fields: object) -> int:
        return int(plan_step(train, algorithm.model_copy(update=fields), world, 60).trained_N.sum())

    assert trained(train) == trained(train, objective="mine:multiple") == 0
    assert trained(train, entropy_coefficient=0.1) == 12
    assert trained(train, objective="mine:objective") == trained(train, objective="mine:bonus") == 12
    assert trained(train, advantage="mine:advantage") == 12
    assert trained(train, whiten_advantages=True) == trained(train, positive_coefficient=0.1) == 12
    assert trained(msgspec.structs.replace(train, check_initial_logprobs=True)) == 12


def test_samples_of_weight_zero_are_not_computed(job, world, batch):
    train, _ = batch()
    train.samples[1] = msgspec.structs.replace(train.samples[1], truncated=True)

    def untrained(**fields: object) -> list[int]:
        plan = plan_step(train, job().spec.algorithm.model_copy(update=fields), world, 60)
        return np.flatnonzero(~plan.trained_N).tolist()

    assert untrained() == untrained(truncated_weight=0.5)
    assert untrained(truncated_weight=0.0) == sorted([*untrained(), 1])


def test_samples_are_skipped_by_the_rewards_that_the_algorithm_uses(job, world, batch):
    train, _ = batch()

    def trained(rewards: list[float], **fields: object) -> list[int]:
        for sample, reward in zip(train.samples, rewards, strict=True):
            sample.reward = reward
        return np.flatnonzero(plan_step(train, job(algorithm=fields).spec.algorithm, world, 60).trained_N).tolist()

    high = [2.0, 3.0, 5.0, 0.0, 2.0, 5.0, *[1.0] * 6]
    assert (trained(high), trained(high, rewardClip=1)) == ([0, 1, 2, 3, 4, 5], [3, 4, 5])
    excess = np.array([sample.response_tokens for sample in train.samples]).reshape(4, 3).clip(10) - 10
    long = np.repeat(excess.min(1) != excess.max(1), 3)
    assert 0 < sum(long) < 12
    assert trained([1.0] * 12) == []
    assert trained([1.0] * 12, overlongBuffer=6) == np.flatnonzero(long).tolist()
    hard = [5.0, 1.0, 0.0] * 3 + [1.0, 0.0, 0.0]  # without the clip only the last group is hard
    for fields in ({"difficultyBelow": 1}, {"difficultyExponent": 1}):
        assert (trained(hard, **fields), trained(hard, rewardClip=1, **fields)) == ([9, 10, 11], list(range(12)))


def stepped(model_directory, world, made, train, shard, functions, monkeypatch) -> tuple[StepResult, str]:
    """Return the result of a step whose algorithm has functions of a module ``mine``, and the digest of the weights."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(**functions))
    algorithm = made.spec.algorithm.model_copy(update={name: f"mine:{name}" for name in functions})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    result = apply(world, backend, algorithm, train, shard, 60)
    return result, pack(backend.named_tensors(), 1).digest()


def test_nan_outside_the_models_tokens_has_no_effect(model_directory, world, job, batch, monkeypatch):
    train, shard = batch()
    made = job(trainer={"optimizer": OPTIMIZER})

    def advantage(inputs, outside=np.nan):
        return {i: np.where(row.mask_L, 0.5 + i % 2, outside) for i, row in inputs.rows.items()}

    def zeros(inputs):
        return advantage(inputs, 0.0)

    def objective(inputs, value=np.nan):
        factor_BK = torch.ones_like(inputs.old_BK).where(inputs.mask_BK, value)
        values_BK = inputs.logprobs_BK * inputs.advantages_BK * factor_BK
        assert (inputs.logprobs_BK[~inputs.mask_BK] == 0).all() and (inputs.advantages_BK[~inputs.mask_BK] == 0).all()
        return Objective(values_BK, torch.ones_like(inputs.old_BK), torch.zeros_like(inputs.mask_BK))

    def zero_objective(inputs):
        return objective(inputs, 0.0)

    expected = stepped(
        model_directory, world, made, train, shard, {"advantage": zeros, "objective": zero_objective}, monkeypatch
    )
    found = stepped(
        model_directory, world, made, train, shard, {"advantage": advantage, "objective": objective}, monkeypatch
    )
    assert np.isfinite(found[0].metrics["grad_norm"]) and found[1] == expected[1]
    assert found[0].advantages_N.tolist() == expected[0].advantages_N.tolist()


def test_an_empty_answer_has_no_weight_and_does_not_break_a_mean_by_sample(
    model_directory, world, job, batch, monkeypatch
):
    train, shard = batch()
    first, prompt = train.samples[0], train.samples[0].prompt_tokens
    train.samples[0] = msgspec.structs.replace(first, response_tokens=0, total_tokens=prompt)
    shard[0] = msgspec.structs.replace(
        shard[0],
        token_ids=shard[0].token_ids[: 4 * prompt],
        logprobs=shard[0].logprobs[: 4 * prompt],
        segments=[Segment("prompt", 0, prompt), Segment("model", prompt, prompt, first.reward)],
    )
    made = job(trainer={"optimizer": OPTIMIZER})

    def aggregation(response_tokens, max_tokens):
        return 1 / (len(response_tokens) * response_tokens)

    result, _ = stepped(model_directory, world, made, train, shard, {"aggregation": aggregation}, monkeypatch)
    assert np.isfinite(result.metrics["loss"]) and result.metrics["grad_norm"] > 0
    np.testing.assert_allclose(  # including the empty answer: the audit compares all samples
        result.advantages_N, reference_advantages(made.spec.algorithm, train), rtol=1e-6
    )

    def advantage(inputs):
        return {i: np.full(len(row.mask_L), 1.0 if row.mask_L.any() else np.nan) for i, row in inputs.rows.items()}

    result, _ = stepped(model_directory, world, made, train, shard, {"advantage": advantage}, monkeypatch)
    assert result.advantages_N.tolist() == [0.0] + [1.0] * (len(train.samples) - 1)


def test_the_same_batches_give_the_same_bits(model_directory, world, job, batch):
    made = job(trainer={"microbatchTokens": 60})
    digests = set()
    for _ in range(2):
        backend = FsdpBackend(model_directory, made.spec.trainer, world)
        train_steps(backend, world, made, [batch(seed, step=seed) for seed in range(2)])
        digests.add(pack(backend.named_tensors(), 1).digest())
    assert len(digests) == 1


def test_a_directory_without_a_model_is_refused_by_name(tmp_path, world, job):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        FsdpBackend(tmp_path, job().spec.trainer, world)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path, model_directory, world, job):
    weights = load_file(model_directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model_directory / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"missing keys \(model.norm.weight\)"):
        FsdpBackend(tmp_path, job().spec.trainer, world)


def test_the_probe_is_fixed_and_its_log_probabilities_are_the_models(model_directory, world, job):
    backend = FsdpBackend(model_directory, job().spec.trainer, world)
    known = probe(backend, world.device, 16)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    assert known.token_ids == probe_tokens(backend.vocabulary) and len(known.token_ids) == 4
    for ids, logprobs in zip(known.token_ids, known.logprobs, strict=True):
        assert len(ids) == 16 and max(ids) < backend.vocabulary
        with torch.no_grad():
            values = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        torch.testing.assert_close(torch.tensor(logprobs), values[torch.arange(15), ids[1:]], rtol=0, atol=1e-5)


def test_tokens_that_an_objective_leaves_out_count_as_clipped_where_the_ratio_is_1(world, job, batch, model_directory):
    bounds = {"covarianceShare": 1, "covarianceLow": -1e6, "covarianceHigh": 1e6}
    made = job(algorithm={"objective": "clip_cov", **bounds})
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    metrics = apply(world, backend, made.spec.algorithm, *batch(), 10_000).metrics
    assert (metrics["clip_fraction"], metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (1, 0, 0)
    assert metrics["grad_norm"] == 0


def test_a_batch_of_several_tasks_has_metrics_of_each(world, job, batch, model_directory):
    def metrics(train, shard, budget):
        made = job(algorithm={"minibatches": 2, "maskProbabilityGap": 0.005})
        backend = FsdpBackend(model_directory, made.spec.trainer, world)
        return apply(world, backend, made.spec.algorithm, train, shard, budget).metrics

    train, shard = batch()
    names = ["b" if sample.group in ("g0", "g3") else "a" for sample in train.samples]
    for sample in train.samples[:3]:
        sample.reward = 1.0  # of all of g0: they are not trained
    whole = metrics(train, shard, 10_000)
    assert not any("/" in name for name in whole)
    changing = {"memory_peak_bytes", *(name for name in whole if "seconds" in name)}
    train.samples[:] = [
        msgspec.structs.replace(sample, task=name) for sample, name in zip(train.samples, names, strict=True)
    ]
    found = metrics(train, shard, 10_000)
    assert {name: value for name, value in found.items() if "/" not in name and name not in changing} == {
        name: pytest.approx(value) for name, value in whole.items() if name not in changing
    }
    tokens = {name: found[f"tokens/{name}"] for name in "ab"}
    trained = {name: [s for s in train.samples[3:] if s.task == name] for name in "ab"}
    assert tokens == {name: sum(s.response_tokens for s in trained[name]) for name in "ab"}
    assert {name: found[f"samples_trained/{name}"] for name in "ab"} == {name: len(trained[name]) for name in "ab"}
    assert (found["samples/a"], found["samples/b"], found["samples"]) == (6, 6, 12)
    for name in ("kl_k1", "kl_k3", "logprob_diff_mean", "clip_fraction", "masked_fraction", "ratio_mean"):
        mean = sum(tokens[task] * found[f"{name}/{task}"] for task in "ab") / sum(tokens.values())
        assert found[name] == pytest.approx(mean, rel=1e-6), name
        assert name == "clip_fraction" or found[f"{name}/a"] != found[f"{name}/b"], name
    for name in ("logprob_diff_max", "ratio_max"):
        assert found[name] == max(found[f"{name}/a"], found[f"{name}/b"])
    small = metrics(train, shard, 20)
    for name in found:
        if name.partition("/")[1]:
            assert small[name] == pytest.approx(found[name], rel=1e-4, abs=1e-6), name
