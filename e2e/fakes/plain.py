"""Synchronous reinforcement learning as a plain loop: the reference for the coordinator at α = 0, bit for bit.

For each step: take the next prompts, answer each samplesPerPrompt times under the current weights, score, replace
groups that the filter rejects by the next prompts, train. No queue, no messages, one sample at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from e2e.fakes.tokens import FIRST_STATE, next_state, reward, write
from rljob.api.models import RLJobSpec
from rljob.api.resolve import DEFAULT_PROMPT
from rljob.api.tasks import Task
from rljob.api.templates import fill
from rljob.protocol.messages import BatchSample, SampleTokens, VersionSpan
from rljob.runner.data.reasoning_gym import ReasoningGymSource
from rljob.runner.tokenizer import TextCodec
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.seeds import derive


@dataclass(frozen=True)
class PlainBatch:
    """One step's batch, and the weights after it."""

    samples: list[BatchSample]
    shard: bytes  # msgpack of list[SampleTokens]
    state: str


def plain_batches(spec: RLJobSpec, codec: TextCodec) -> Iterator[PlainBatch]:
    """Yield the batches of a synchronous run."""
    tasks = {task.name: task for task in spec.tasks}
    sources = {task.name: ReasoningGymSource(task.data.reasoning_gym, spec.seed, "") for task in spec.tasks}
    prompts = Mixture({task.name: task.weight for task in spec.tasks})
    state, admitted = FIRST_STATE, 0
    for step in range(spec.training.steps):
        scalars: list[BatchSample] = []
        tokens: list[SampleTokens] = []
        while len(scalars) < spec.training.prompts_per_step * spec.training.samples_per_prompt:
            name, row = prompts.next()
            prompt = codec.encode(fill(tasks[name].prompt or DEFAULT_PROMPT, sources[name].problem("train", row)))
            group = [
                _answer(spec, tasks[name], codec, state, step, f"g{admitted}", member, prompt)
                for member in range(spec.training.samples_per_prompt)
            ]
            admitted += 1
            constant = len({sample.reward for sample, _ in group}) == 1
            if not (constant and spec.algorithm.group_filter == "nonconstant"):
                scalars += [sample for sample, _ in group]
                tokens += [sequence for _, sequence in group]
        shard = msgspec.msgpack.encode(tokens)
        state = next_state(state, shard)
        yield PlainBatch(scalars, shard, state)


def _answer(
    spec: RLJobSpec, task: Task, codec: TextCodec, state: str, step: int, group: str, member: int, prompt: bytes
) -> tuple[BatchSample, SampleTokens]:
    sample, sampling, given = f"{group}.{member}", task.sampling, len(prompt) // 4
    stream, _ = write(state, prompt, derive(spec.seed, sample, 0, 0), sampling.max_tokens, codec.stop_token_ids)
    written = len(stream.token_ids)
    scored = reward(codec.decode(stream.token_ids.tobytes()))
    scalars = BatchSample(sample, group, scored, given, written, step, sampling.temperature, sampling.max_tokens)
    sequence = SampleTokens(
        sample=sample,
        token_ids=prompt + stream.token_ids.tobytes(),
        logprobs=bytes(4 * given) + stream.logprobs.tobytes(),
        loss_mask=bytes(given) + b"\x01" * written,
        spans=[VersionSpan(step, given, given + written)],
    )
    return scalars, sequence
