"""Advantages, objectives, aggregations and a backend of a package outside the repository."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import on_ranks
from training_steps import apply

from rljob.api.extensions import BACKENDS, load
from rljob.api.models import RLJob
from rljob.protocol import trainer_protocol as m
from rljob.trainer.algorithms.needs import Needs, needs, needs_of, requires
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.process_group import World
from rljob.trainer.step import StepResult
from rljob.trainer.step_checks import StepChecks

OF_THE_MACHINE = {"seconds", "seconds_pull", "tokens_per_second", "memory_peak_bytes"}
ALGORITHMS = """
import numpy as np
import torch

from rljob.trainer.algorithms.advantages.base import per_batch, per_group
from rljob.trainer.algorithms.needs import requires


@per_group
def best_of_group(rewards_G):
    return (rewards_G == rewards_G.max()).astype(float)


@per_batch
def whitened(inputs):
    return (inputs.rewards_N - inputs.rewards_N.mean()) / (inputs.rewards_N.std() + 1e-6)


@requires(old=True)
def surprise(inputs):
    old = inputs.scores.old_by_row()
    return {i: rewards_L.sum() - 0.1 * old[i] for i, rewards_L in inputs.rewards.items()}


@per_group
def broken(rewards_G):
    raise KeyError("no such prompt")


def short(inputs):
    return {i: np.zeros(1) for i in inputs.rows}


def reinforce(inputs):
    from rljob.trainer.algorithms.objectives.base import Objective

    none_BK = torch.zeros_like(inputs.mask_BK)
    return Objective(inputs.logprobs_BK * inputs.advantages_BK, torch.ones_like(inputs.logprobs_BK), none_BK)


def narrow(inputs):
    from rljob.trainer.algorithms.objectives.base import Objective

    return Objective(inputs.logprobs_BK[:, :1], inputs.logprobs_BK, inputs.mask_BK)


def raising(inputs):
    raise RuntimeError("no such token")


def nan(inputs):
    return {i: np.full(len(row.mask_L), np.nan) for i, row in inputs.rows.items()}


def by_sample(response_tokens, max_tokens):
    return 1 / (len(response_tokens) * response_tokens)


def one(response_tokens, max_tokens):
    return np.ones(1)


def infinite(response_tokens, max_tokens):
    return np.full(len(max_tokens), 1e300)


def zero_division(response_tokens, max_tokens):
    return 1 // 0


def wide(inputs):
    return {i: np.full(len(row.mask_L), 1e300) for i, row in inputs.rows.items()}


@requires(entropy=True)
def entropic(inputs):
    from rljob.trainer.algorithms.objectives.base import Objective

    return Objective(inputs.entropy_BK, torch.ones_like(inputs.old_BK), torch.zeros_like(inputs.mask_BK))


def half(inputs):
    return torch.full_like(inputs.old_BK, 0.5)


def narrow_weights(inputs):
    return torch.ones(1, 1)


def column_of(name):
    def objective(inputs):
        from dataclasses import replace

        result = reinforce(inputs)
        return replace(result, **{name: getattr(result, name)[:, :1]})

    return objective



def constant(inputs):
    from rljob.trainer.algorithms.objectives.base import Objective

    return Objective(inputs.advantages_BK, torch.ones_like(inputs.old_BK), torch.zeros_like(inputs.mask_BK))


def failing_on_rank_1(inputs):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no such token")
    return reinforce(inputs)


def lost_on_rank_1(response_tokens, max_tokens):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no such sample")
    return by_sample(response_tokens, max_tokens)


narrow_ratio, narrow_clipped = column_of("ratio_BK"), column_of("clipped_BK")


def nan_at_one_token(inputs):
    from dataclasses import replace

    values_BK, mask_BK = reinforce(inputs).values_BK, inputs.mask_BK
    first_BK = (mask_BK.flatten().cumsum(0) == 1).view_as(mask_BK) & mask_BK
    return replace(reinforce(inputs), values_BK=values_BK * torch.where(first_BK, torch.nan, 1.0))


def infinite_kl(logprobs_BK, reference_BK):
    return (logprobs_BK - reference_BK) / 0


def always(value):
    return lambda *inputs: value


nothing, mapping, number, one_number = always(None), always({}), always(0.5), always([0.5])
nothing_of_group, mapping_of_group = per_group(nothing), per_group(mapping)
mapping_of_batch, one_of_batch = per_batch(mapping), per_batch(one_number)


def text_of_rows(inputs):
    return {i: "high" for i in inputs.rows}


def values_alone(inputs):
    return inputs.logprobs_BK * inputs.advantages_BK


def tuple_of_three(inputs):
    result = reinforce(inputs)
    return result.values_BK, result.ratio_BK, result.clipped_BK


def replaced(**fields):
    def objective(inputs):
        from dataclasses import replace

        return replace(reinforce(inputs), **fields)

    return objective


float_ratio, numpy_clipped = replaced(ratio_BK=1.0), replaced(clipped_BK=np.zeros((1, 1), bool))


def reversed_weights(inputs):
    return -torch.ones_like(inputs.old_BK)


def numpy_weights(inputs):
    return np.ones(inputs.old_BK.shape)


def negative_on_rank_1(inputs):
    return half(inputs) * (1 - 2 * torch.distributed.get_rank())


def negative(response_tokens, max_tokens):
    return -by_sample(response_tokens, max_tokens)
"""
BACKEND = """
import torch
from safetensors.torch import load_file

from rljob.trainer.backends.base import OptimizerUpdate, Output, SavedState
from rljob.trainer.checkpoint import read_state


class Bigrams:
    def __init__(self, source, settings, world):
        self.world, self.dtype, self.vocabulary, self.updates = world, torch.float32, 61, 0
        self.rate = settings.optimizer.learning_rate
        stored = load_file(source / "model.safetensors").get("table.weight", torch.zeros(61, 61))
        self.table = stored.requires_grad_()

    def run(self, microbatches, loss):
        outputs = []
        for i, microbatch in enumerate(microbatches):
            with torch.set_grad_enabled(loss is not None):
                logits = self.table[microbatch.token_ids_BL[:, microbatch.keep_K]]
                logprobs = torch.log_softmax(logits / microbatch.temperature_B[:, None, None], -1)
                output = Output(logprobs.gather(-1, microbatch.targets_BK[..., None])[..., 0])
                if loss is not None:
                    loss(i, output).backward()
            outputs.append(Output(output.logprobs_BK.detach()))
        return outputs

    def update(self, step):
        gradient = self.world.sum_over_data(self.table.grad)
        self.table = (self.table.detach() - self.rate * gradient).requires_grad_()
        self.updates += 1
        return OptimizerUpdate(float(gradient.norm()), self.rate)

    def metrics(self):
        return {"bigrams_largest": float(self.table.detach().abs().max())}

    def named_tensors(self, dtype=torch.float32):
        yield "table.weight", self.table.detach().to(dtype)

    def save(self):
        return SavedState({"table.weight": self.table.detach().clone()} if self.world.rank == 0 else {}, {})

    def load(self, checkpoint):
        self.updates = read_state(checkpoint).updates


class OneReplica(Bigrams):
    '''All ranks are one replica: each has all rows, and there is nothing to sum.'''

    def __init__(self, source, settings, world):
        super().__init__(source, settings, world)
        groups = [torch.distributed.new_group([rank]) for rank in range(world.size)]
        self.world = world.with_data_parallel(0, 1, groups[world.rank])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``mine`` that this process and its children can import."""
    directory = tmp_path / "packages" / "mine"
    directory.mkdir(parents=True)
    (directory / "algorithms.py").write_text(ALGORITHMS)
    (directory / "backend.py").write_text(BACKEND)
    monkeypatch.setenv("PYTHONPATH", str(directory.parent))
    monkeypatch.syspath_prepend(directory.parent)
    return directory


def step(world: World, source: Path, job: RLJob, batch) -> StepResult:
    train, tokens = batch
    backend = FsdpBackend(source, job.spec.trainer, world)
    return apply(world, backend, job.spec.algorithm, train, tokens, 60)


def test_another_attribute_named_needs_declares_nothing():
    assert needs_of(SimpleNamespace(needs=["coffee"])) == Needs()
    assert needs_of(requires(old=True)(lambda inputs: {})) == Needs(old=True)


def test_an_advantage_of_each_group(package, model_directory, world, job, batch):
    train, tokens = batch()
    made = job(algorithm={"advantage": "mine.algorithms:best_of_group"})
    best = {s.group: max(o.reward for o in train.samples if o.group == s.group) for s in train.samples}
    result = step(world, model_directory, made, (train, tokens))
    assert result.advantages_N.tolist() == [float(s.reward == best[s.group]) for s in train.samples]


def test_an_advantage_of_the_whole_batch_on_every_rank(package, model_directory, job, batch):
    train, tokens = batch()
    made = job(algorithm={"advantage": "mine.algorithms:whitened"})
    rewards = np.array([sample.reward for sample in train.samples])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for result in on_ranks(2, step, model_directory, made, (train, tokens)):
        np.testing.assert_allclose(result.advantages_N, expected, rtol=1e-6)


def test_an_advantage_of_each_token_from_scores_that_it_requires(package, model_directory, world, job, batch):
    train, tokens = batch()
    made = job(algorithm={"advantage": "mine.algorithms:surprise"})
    uncorrected = job(algorithm={"ratio": "behavior", "correction": "none"}).spec.algorithm
    assert needs(uncorrected) == Needs() and needs(job().spec.algorithm) == Needs(old=True)
    assert needs(uncorrected.model_copy(update={"advantage": made.spec.algorithm.advantage})) == Needs(old=True)
    result = step(world, model_directory, made, (train, tokens))
    rewards = np.array([sample.reward for sample in train.samples])
    counts = np.array([sample.response_tokens for sample in train.samples])
    entropy = ((result.advantages_N - rewards) / 0.1 * counts).sum() / counts.sum()
    assert entropy == pytest.approx(result.metrics["training_log_ppl"], rel=1e-5)


def test_an_objective_and_an_aggregation(package, model_directory, world, job, batch):
    train, tokens = batch()
    made = job(algorithm={"objective": "mine.algorithms:reinforce", "aggregation": "mine.algorithms:by_sample"})
    result = step(world, model_directory, made, (train, tokens))
    other = step(world, model_directory, job(), (train, tokens))
    assert result.metrics["ratio_max"] == 1 and result.metrics["clip_fraction"] == 0
    assert result.metrics["loss"] != other.metrics["loss"]
    assert result.metrics["training_log_ppl"] == other.metrics["training_log_ppl"]


def test_a_backend_without_entropies_is_refused_by_an_algorithm_that_needs_them(
    package, model_directory, world, job, batch
):
    made = job(trainer={"backend": "mine.backend:Bigrams"}, algorithm={"entropyCoefficient": 0.1})
    backend = load(BACKENDS, "mine.backend:Bigrams", "")(model_directory, made.spec.trainer, world)
    with pytest.raises(UnrecoverableError, match=r"entropies, which Bigrams does not compute"):
        apply(world, backend, made.spec.algorithm, *batch(), 60)


def test_an_objective_that_reads_entropies(package, model_directory, world, job, batch):
    made = job(algorithm={"objective": "mine.algorithms:entropic", "correction": "none"})
    metrics = step(world, model_directory, made, batch()).metrics
    assert metrics["entropy"] == pytest.approx(-metrics["loss"], rel=1e-5)


def test_a_correction(package, model_directory, world, job, batch):
    train, tokens = batch()
    uncorrected = job(algorithm={"correction": "none"})
    made = job(algorithm={"correction": "mine.algorithms:half"})
    half, whole = (step(world, model_directory, each, (train, tokens)).metrics for each in (made, uncorrected))
    assert half["correction_mean"] == 0.5 and whole["correction_mean"] == 1
    assert half["loss"] == pytest.approx(whole["loss"] / 2, rel=1e-5)
    assert half["grad_norm"] == pytest.approx(whole["grad_norm"] / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "name", "sentence"),
    [
        ("advantage", "broken", "no such prompt"),
        ("advantage", "raising", "RuntimeError: no such token"),
        ("advantage", "short", r"an array of shape \(1,\) for \d+ tokens"),
        ("advantage", "nan", "nan or an infinite number"),
        ("objective", "raising", "RuntimeError: no such token"),
        ("advantage", "wide", "an infinite number in float32"),
        ("objective", "narrow", r"values_BK of shape \(\d+, 1\) for tokens of shape"),
        ("objective", "narrow_ratio", r"ratio_BK of shape \(\d+, 1\) for tokens of shape"),
        ("objective", "narrow_clipped", r"clipped_BK of shape \(\d+, 1\) for tokens of shape"),
        ("objective", "constant", "without a gradient"),
        ("aggregation", "one", r"an array of shape \(1,\) for 12 samples"),
        ("aggregation", "infinite", "an infinite number in float32"),
        ("aggregation", "zero_division", "ZeroDivisionError"),
        ("correction", "narrow_weights", r"weights of shape \(1, 1\) for"),
        ("correction", "raising", "RuntimeError: no such token"),
        ("advantage", "nothing", r"it returned None; it must return a mapping .*@per_group"),
        ("advantage", "mapping", r"it returned no array for \d+ of the \d+ rows; it must return one for each"),
        ("advantage", "one_number", "it returned list; it must return a mapping"),
        ("advantage", "text_of_rows", r"it returned str for \d+ tokens; it must return an array of \d+ numbers"),
        ("advantage", "nothing_of_group", r"it returned None for a group of \d+; it must return an array of"),
        ("advantage", "mapping_of_group", r"it returned dict for a group of \d+; it must return an array"),
        ("advantage", "mapping_of_batch", "it returned dict for 12 samples; it must return an array of 12 numbers"),
        ("advantage", "one_of_batch", r"it returned an array of shape \(1,\) for 12 samples; it must have"),
        ("objective", "nothing", r"it returned None; it must return Objective\(values_BK, ratio_BK, clipped"),
        ("objective", "values_alone", r"it returned Tensor; it must return Objective\(values_BK"),
        ("objective", "tuple_of_three", r"it returned tuple; it must return Objective\(values_BK"),
        ("objective", "float_ratio", "it returned ratio_BK of type float; it must be a tensor"),
        ("objective", "numpy_clipped", "it returned clipped_BK of type ndarray; it must be a tensor"),
        ("aggregation", "nothing", "it returned None for 12 samples; it must return an array of 12 numbers"),
        ("aggregation", "mapping", "it returned dict for 12 samples; it must return an array of 12 numbers"),
        ("aggregation", "negative", "it returned a weight below 0; the weight of each sample must be at least 0"),
        ("correction", "number", "it returned float; it must return a tensor of weights"),
        ("correction", "numpy_weights", "it returned ndarray; it must return a tensor of weights"),
        (
            "correction",
            "reversed_weights",
            r"returned a weight below 0 at \d+ tokens, which reverses .*; return at least 0",
        ),
    ],
)
def test_an_algorithm_that_fails_ends_the_run_with_its_name(
    package, model_directory, world, job, batch, field, name, sentence
):
    made = job(algorithm={field: f"mine.algorithms:{name}"})
    with pytest.raises(UnrecoverableError, match=rf"spec\.algorithm\.{field}: mine\.algorithms:{name} .*{sentence}"):
        step(world, model_directory, made, batch())


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"objective": "mine.algorithms:nan_at_one_token"}, r"objective mine\.algorithms:nan_at_one_token"),
        (
            {"klCoefficient": 1, "klEstimator": "mine.algorithms:infinite_kl"},
            r"klEstimator mine\.algorithms:infinite_kl",
        ),
    ],
)
def test_a_loss_that_is_not_finite_is_named_when_skipped_updates_end_the_run(
    package, model_directory, world, job, batch, fields, cause
):
    made = job(algorithm=fields, trainer={"optimizer": {"maxSkippedUpdates": 1}})
    backend, (train, tokens) = FsdpBackend(model_directory, made.spec.trainer, world), batch()
    frozen = {"reference": backend.load_frozen(model_directory)} if "klCoefficient" in fields else None
    sentence = rf"now nan, because spec\.algorithm\.{cause} was nan or infinite at \d+ tokens; lower"
    with pytest.raises(UnrecoverableError, match=sentence):
        checks = StepChecks.of(made.spec)
        apply(world, backend, made.spec.algorithm, train, tokens, 60, checks=checks, frozen=frozen)


def failure(world: World, source: Path, job: RLJob, batch) -> str:
    with pytest.raises(UnrecoverableError) as raised:
        step(world, source, job, batch)
    return f"{raised.value}; {world.broadcast(b'still together' if world.rank == 0 else None).decode()}"


@pytest.mark.parametrize(
    ("field", "name", "sentence"),
    [
        ("objective", "failing_on_rank_1", "RuntimeError: no such token"),
        ("aggregation", "lost_on_rank_1", "RuntimeError: no such sample"),
    ],
)
def test_a_function_that_fails_on_one_rank_fails_on_all(package, model_directory, job, batch, field, name, sentence):
    made = job(algorithm={field: f"mine.algorithms:{name}"})
    expected = f"spec.algorithm.{field}: mine.algorithms:{name} failed: {sentence}; still together"
    assert on_ranks(2, failure, model_directory, made, batch()) == [expected] * 2


def test_a_negative_weight_of_a_correction_on_one_rank_ends_the_run_on_all(package, model_directory, job, batch):
    made = job(algorithm={"correction": "mine.algorithms:negative_on_rank_1"})
    first, second = on_ranks(2, failure, model_directory, made, batch())
    assert first == second and first.endswith("still together")
    assert first.startswith("spec.algorithm.correction: mine.algorithms:negative_on_rank_1 returned a weight below 0")


async def test_a_backend_trains_checkpoints_and_resumes(tmp_path, package, job, batch, coordinator, start):
    made = job(
        trainer={"backend": "mine.backend:Bigrams", "optimizer": {"learningRate": 0.5}},
        algorithm={"advantage": "mine.algorithms:whitened"},
    )
    coordinator.batches = {number: batch(seed=number, step=number) for number in range(3)}
    (process,) = await start(coordinator, made)
    await coordinator.admit()
    done = await coordinator.train(0)
    assert done.metrics["bigrams_largest"] > 0
    assert done.metrics["training_log_ppl"] == pytest.approx(np.log(61), rel=1e-6)
    await coordinator.train(1)
    await coordinator.send(m.Checkpoint(1, 2, []))
    await coordinator.receive(m.Checkpointed)
    await coordinator.train(2)
    after_three = await coordinator.digest()
    process.kill()
    await process.wait()
    await start(coordinator, made)
    assert (await coordinator.admit(3)).step == 2
    await coordinator.train(2)
    assert await coordinator.digest() == after_three


async def test_ranks_of_one_replica_pull_the_same_shard_and_train_as_one_rank(
    package, job, batch, coordinator, start, tmp_path
):
    results = []
    coordinator.batches = {0: batch()}
    for ranks in (1, 2):
        coordinator.pulls.clear()
        made = job(trainer={"backend": "mine.backend:OneReplica", "optimizer": {"learningRate": 0.5}})
        processes = await start(coordinator, made, ranks)
        await coordinator.admit()
        done = await coordinator.train(0)
        assert coordinator.pulls == [(0, list(range(12)))] * ranks
        metrics = {name: value for name, value in done.metrics.items() if name not in OF_THE_MACHINE}
        results.append((metrics, done.advantages, await coordinator.digest()))
        await coordinator.send(m.Stop("done"))
        assert [await process.wait() for process in processes] == [0] * ranks
        shutil.rmtree(tmp_path / "storage")
    assert results[0] == results[1]


async def test_an_invalid_reference_ends_the_trainer_with_2(package, job, coordinator, start):
    (process,) = await start(coordinator, job(algorithm={"advantage": "mine.algorithms:absent"}))
    assert await asyncio.wait_for(process.wait(), 50) == 2
