"""Samples with branches: trees of token sequences, against plain torch over each turn under its own context."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from test_ranks import compare, train
from test_two_turns import gradients_of
from training_steps import CHECKS, plan_all
from transformers import AutoModelForCausalLM

from rljob.protocol.batch_samples import BatchSample, SampleTokens, Segment
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.base import AdvantageInputs
from rljob.trainer.algorithms.needs import requires
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.batch_plan import assign_samples, plan_batch, positions, sequences
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.fetch_batch import check_shard
from rljob.trainer.step import apply_batch

VOCABULARY, TEMPERATURE = 61, 0.7
TREES = (
    [[0]],
    [[0, 1], [0, 2]],
    [[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 4, 6, 7]],
    [[0], [1], [2]],  # branches before the first turn share no turn
    [[0, 1, 2]],
    [[0, 1, 3], [0, 1, 3, 4], [0, 2]],
)
"""Turns of each sequence of a sample. The turns that an earlier sequence has are its prefix."""


class Tree:
    """Random tokens of a sample: ``given`` and ``written`` of each turn, with the engine's log-probabilities."""

    def __init__(self, paths: list[list[int]], generator: np.random.Generator) -> None:
        self.paths = paths
        turns = sorted({turn for path in paths for turn in path})
        self.given = {t: generator.integers(0, VOCABULARY, generator.integers(1, 6)) for t in turns}
        self.written = {t: generator.integers(0, VOCABULARY, generator.integers(1, 6)) for t in turns}
        self.logprobs = {t: -4 + 0.4 * generator.standard_normal(len(self.written[t])) for t in turns}

    def context(self, turn: int) -> np.ndarray:
        """Return the tokens before what the model wrote in a turn."""
        path = next(path for path in self.paths if turn in path)
        before = [ids for t in path[: path.index(turn)] for ids in (self.given[t], self.written[t])]
        return np.concatenate([*before, self.given[turn]])

    def tokens(self, name: str, reward: float) -> SampleTokens:
        """Return the sample as the coordinator serves it. The reward is that of the last turn."""
        ids: list[Any] = []
        logprobs: list[Any] = []
        segments, ends, end, known = [], [], 0, set()
        for path in self.paths:
            shared = [t for t in path if t in known]
            length = sum(len(self.given[t]) + len(self.written[t]) for t in shared)
            segments += [Segment("prefix", end, end + length)] if shared else []
            end += length
            for t in path:
                ids += [self.given[t], self.written[t]]
                logprobs += [np.zeros(len(self.given[t])), self.logprobs[t] * (t not in known)]
                if t not in known:
                    begin = end + len(self.given[t])
                    segments.append(Segment("observation" if t else "prompt", end, begin))
                    end = begin + len(self.written[t])
                    segments.append(Segment("model", begin, end))
                known.add(t)
            ends.append(end)
        segments[-1].reward = reward
        return SampleTokens(
            name,
            np.concatenate(ids).astype("<i4").tobytes(),
            np.concatenate(logprobs).astype("<f4").tobytes(),
            segments,
            [],
            ends if len(ends) > 1 else [],
        )


def make_batch(seed: int) -> tuple[Train, list[SampleTokens], list[Tree]]:
    """Return a batch of 3 groups of 2 samples, one of each of TREES."""
    generator = np.random.default_rng(seed)
    trees, samples, tokens = [Tree(paths, generator) for paths in TREES], [], []
    for i, tree in enumerate(trees):
        reward = float(generator.integers(0, 3)) + i % 2
        one = tree.tokens(f"{i // 2}.{i % 2}", reward)
        lengths = np.diff([0, *one.ends]).tolist()
        written = sum(map(len, tree.written.values()))
        samples.append(
            BatchSample(
                one.sample, f"{i // 2}", reward, len(tree.given[0]), written, len(one.token_ids) // 4, -1, TEMPERATURE,
                16, lengths,
            )
        )  # fmt: skip
        tokens.append(one)
    return Train(1, 0, samples, False), tokens, trees


def logprobs_of(model: torch.nn.Module, tree: Tree, turn: int) -> torch.Tensor:
    """Return the log-probabilities of the tokens that the model wrote in a turn, under the context of the turn."""
    context, written = tree.context(turn), torch.from_numpy(tree.written[turn])
    ids = torch.cat([torch.from_numpy(context), written])
    logits = model(input_ids=ids[None]).logits[0, len(context) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(-1, written[:, None]).squeeze(-1)


def numbers(inputs: AdvantageInputs) -> dict[int, np.ndarray]:
    """Return as advantage of a token the number of its turn, from 1, in the order of the sequences."""
    return {i: row.turns_L + 1.0 for i, row in inputs.rows.items()}


def reference(
    source: str, train: Train, trees: list[Tree], clip: tuple[float, float], by_turn: bool
) -> dict[str, torch.Tensor]:
    """Return the gradients of a plain model over all turns of all samples, each turn once."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rewards, total = [sample.reward for sample in train.samples], torch.zeros(())
    for i, tree in enumerate(trees):
        for number, turn in enumerate(dict.fromkeys(turn for path in tree.paths for turn in path)):
            advantage = number + 1.0 if by_turn else rewards[i] - (rewards[i] + rewards[i ^ 1]) / 2
            engine = torch.from_numpy(tree.logprobs[turn].astype(np.float32))
            ratio = (logprobs_of(model, tree, turn) - engine).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(*clip) * advantage).sum()
    (total / sum(sample.response_tokens for sample in train.samples)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("advantage", ["group_centered", "mine:numbers"])
def test_each_token_is_trained_once_under_its_own_context(model_directory, world, job, monkeypatch, budget, advantage):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(numbers=numbers))
    made = job(algorithm={"advantage": "group_centered", "ratio": "behavior", "correction": "none", "dualClip": 0})
    algorithm = made.spec.algorithm.model_copy(update={"advantage": advantage})
    train, tokens, trees = make_batch(budget)
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    gradients, rows = gradients_of(backend), check_shard(tokens, train.samples, range(6))
    plan = plan_all(train, algorithm, world, budget)
    result = apply_batch(plan, rows, algorithm, backend, world, CHECKS)
    clip = (1 - algorithm.clip_low, 1 + algorithm.clip_high)
    by_turn = advantage == "mine:numbers"
    for name, gradient in reference(str(model_directory), train, trees, clip, by_turn).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6)
    rewards = np.asarray([sample.reward for sample in train.samples])
    assert result.metrics["tokens"] == sum(sample.response_tokens for sample in train.samples)
    if by_turn:
        return
    np.testing.assert_allclose(result.advantages_N, rewards - rewards.reshape(3, 2).mean(1).repeat(2), atol=1e-7)


def test_scores_of_tokens_are_those_under_their_own_context(model_directory, world, job, monkeypatch):
    found: dict[int, np.ndarray] = {}

    @requires(old=True)
    def observed(inputs: AdvantageInputs) -> dict[int, np.ndarray]:
        found.update(inputs.scores.old_by_row())
        return {i: np.zeros(len(row.mask_L)) for i, row in inputs.rows.items()}

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(observed=observed))
    made = job(algorithm={"advantage": "group_centered", "ratio": "behavior", "correction": "none", "dualClip": 0})
    algorithm = made.spec.algorithm.model_copy(update={"advantage": "mine:observed"})
    train, tokens, trees = make_batch(3)
    backend, rows = FsdpBackend(model_directory, made.spec.trainer, world), check_shard(tokens, train.samples, range(6))
    apply_batch(plan_all(train, algorithm, world, 60), rows, algorithm, backend, world, CHECKS)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    for i, tree in enumerate(trees):
        order = list(dict.fromkeys(turn for path in tree.paths for turn in path))
        expected = torch.cat([logprobs_of(model, tree, turn) for turn in order]).detach().numpy()
        np.testing.assert_allclose(found[i][rows[i].mask_L], expected, atol=1e-5)
        assert not found[i][~rows[i].mask_L].any() and len(found[i]) == train.samples[i].total_tokens


def test_ranks_give_the_parameters_and_metrics_of_one_rank(model_directory, job):
    made = job(algorithm={"minibatches": 2}, trainer={"microbatchTokens": 60, "optimizer": {"learningRate": 1e-3}})
    steps = [make_batch(seed)[:2] for seed in range(2)]
    arguments = (model_directory, made, steps)
    [alone] = on_ranks(1, train, *arguments)
    compare(on_ranks(2, train, *arguments), alone)


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), max_size=20), st.integers(1, 5), st.data())
def test_all_rows_of_a_sample_are_on_one_rank_and_within_the_budget(lengths, ranks, data):
    budget, packed = data.draw(st.integers(1, 100)), data.draw(st.booleans())
    owners = [i for i, own in enumerate(lengths) for _ in own]
    tokens = [length for own in lengths for length in own]
    rows = [row for row, sample in enumerate(owners) if sample % 3]
    plan = assign_samples(rows, owners, tokens, ranks, budget, packed)
    assert len(plan) == ranks and len({len(microbatches) for microbatches in plan}) == 1 and plan[0]
    assert sorted(row for microbatches in plan for part in microbatches for row in part) == rows
    of_ranks = [{owners[row] for part in microbatches for row in part} for microbatches in plan]
    assert sum(map(len, of_ranks)) == len({owners[row] for row in rows})
    for part in (part for microbatches in plan for part in microbatches):
        assert len(part) <= 1 or positions([part], tokens, packed) <= budget


def test_ranks_with_branches_are_balanced_by_tokens():
    generator = np.random.default_rng(0)
    samples = []
    for i in range(256):
        own = generator.lognormal(np.log(512), 0.5, generator.integers(1, 5)).astype(int).tolist()
        samples.append(BatchSample(f"{i}", f"{i // 8}", 0.0, 1, 2, sum(own), 0, 1.0, 4096, own if len(own) > 1 else []))
    train, trained_N = Train(1, 0, samples, False), np.ones(256, np.bool_)
    plans = [plan_batch(train, trained_N, 1, rank, 8, 16_384) for rank in range(8)]
    assert sorted(i for plan in plans for i in plan.indices) == list(range(256))
    assert plans[0].lockstep <= 1.18
    assert sum(row.tokens for row in sequences(samples)) == sum(sample.total_tokens for sample in samples)


@pytest.mark.parametrize("change", ["ends", "scalars", "mask"])
def test_sequences_that_differ_from_the_batch_are_refused(change):
    train, tokens, _ = make_batch(1)
    sample, scalars = tokens[1], train.samples[1]
    if change == "ends":
        sample.ends = [sample.ends[0] + 1, sample.ends[1]]
    elif change == "scalars":
        scalars = msgspec.structs.replace(scalars, sequences=[])
    else:  # the prefix would be trained twice
        next(segment for segment in sample.segments if segment.kind == "prefix").kind = "model"
    with pytest.raises(UnrecoverableError, match=r"its sequences are not|its loss mask"):
        check_shard([sample], [scalars], [0])


def test_a_sequence_that_begins_with_a_token_of_the_model_is_refused():
    segments = [Segment("prompt", 0, 2), Segment("model", 2, 3), Segment("model", 3, 4), Segment("observation", 4, 6)]
    scalars = BatchSample("a", "a", 0.0, 2, 2, 6, 0, 1.0, 8, [3, 3])
    with pytest.raises(UnrecoverableError, match="its loss mask does not cover its response"):
        check_shard([SampleTokens("a", bytes(24), bytes(24), segments, [], [3, 6])], [scalars], [0])
    segments[2:] = [Segment("prefix", 3, 5), Segment("model", 5, 6)]
    check_shard([SampleTokens("a", bytes(24), bytes(24), segments, [], [3, 6])], [scalars], [0])
