"""A step against plain torch: one model, one sample at a time, no padding, no sharding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob.api.models import Algorithm, Optimizer, RLJob
from rljob.protocol.messages import SampleTokens, Train
from rljob.trainer.batch import check_shard, split_minibatches
from rljob.trainer.fsdp import FsdpBackend
from rljob.trainer.step import apply_batch
from rljob.trainer.world import World

TOLERANCE = 1e-6


def reference_advantage(algorithm: Algorithm, rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    if algorithm.advantage == "group_centered":
        return [reward - mean for reward in rewards]
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (variance**0.5 + 1e-6) for reward in rewards]


def reference_logprobs(model: torch.nn.Module, tokens: SampleTokens, temperature: float) -> torch.Tensor:
    ids = torch.from_numpy(np.frombuffer(tokens.token_ids, np.int32).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]


def reference_training(
    source: str, steps: list[tuple[Train, list[SampleTokens]]], algorithm: Algorithm, settings: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a plain model; return its parameters and the last gradient before clipping."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    for train, shard in steps:
        groups = [sample.group for sample in train.samples]
        with torch.no_grad():
            old = [reference_logprobs(model, t, s.temperature) for t, s in zip(shard, train.samples, strict=True)]
        for minibatch in split_minibatches(groups, algorithm.minibatches):
            total = torch.zeros(())
            divisor = sum(train.samples[i].response_tokens for i in minibatch)
            for i in minibatch:
                sample = train.samples[i]
                rewards = [other.reward for other in train.samples if other.group == sample.group]
                place = [other.sample for other in train.samples if other.group == sample.group].index(sample.sample)
                advantage = reference_advantage(algorithm, rewards)[place]
                logprobs = reference_logprobs(model, shard[i], sample.temperature)[sample.prompt_tokens - 1 :]
                behavior = torch.from_numpy(np.frombuffer(shard[i].logprobs, np.float32).copy())[sample.prompt_tokens :]
                against = behavior if algorithm.ratio == "behavior" else old[i][sample.prompt_tokens - 1 :]
                ratio = (logprobs - against).exp()
                clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                objective = torch.minimum(ratio * advantage, clipped * advantage).sum()
                if algorithm.aggregation == "token_sum_constant":
                    objective = objective * divisor / (len(minibatch) * sample.max_tokens)
                total = total - objective / divisor
            optimizer.zero_grad()
            total.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, gradients


def train_steps(
    backend: FsdpBackend, world: World, job: RLJob, steps: list[tuple[Train, list[SampleTokens]]]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Apply the batches; return the last figures and the last gradient before clipping."""
    gradients: dict[str, torch.Tensor] = {}
    update = backend.update

    def observed(step: int) -> dict[str, float]:
        for name, parameter in backend.model.named_parameters():
            gradients[name] = parameter.grad.full_tensor().clone()
        return update(step)

    backend.update = observed
    for train, shard in steps:
        rows = check_shard(shard, train.samples, list(range(len(shard))))
        figures = apply_batch(train, rows, job.spec.algorithm, backend, world, job.spec.trainer.microbatch_tokens)
    return figures, gradients


ALGORITHMS = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "minibatches": {"preset": "grpo", "ratio": "proximal", "minibatches": 3, "clipHigh": 0.28},
}
# Key biases have no gradient but rounding, which AdamW would blow up: a large epsilon keeps the comparison meaningful.
OPTIMIZER = {"learningRate": 1e-3, "maxGradNorm": 0.05, "weightDecay": 0.1, "epsilon": 1e-3}


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_steps_give_the_gradients_and_parameters_of_plain_torch(
    model_directory, world, job, batch, algorithm, budget
):
    made = job(algorithm=ALGORITHMS[algorithm], trainer={"microbatchTokens": budget, "optimizer": OPTIMIZER})
    steps = [batch(seed, step=seed) for seed in range(2)]
    backend = FsdpBackend(model_directory, made.spec.trainer, world)
    _, gradients = train_steps(backend, world, made, steps)
    parameters, expected = reference_training(
        str(model_directory), steps, made.spec.algorithm, made.spec.trainer.optimizer
    )
    for name, tensor in backend.named_tensors():
        torch.testing.assert_close(gradients[name], expected[name], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(tensor, parameters[name], rtol=0, atol=TOLERANCE)
