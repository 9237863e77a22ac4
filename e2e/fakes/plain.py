"""Synchronous reinforcement learning as a plain loop: the reference for the coordinator at α = 0, bit for bit.

For each step: take the next prompts, answer each samplesPerPrompt times under the current weights, score, replace
groups that the filter rejects by the next prompts, train. No queue, no messages, one sample at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from e2e.fakes.extensions import FIRST_TURN_REWARD, OBSERVATION
from e2e.fakes.tokens import FIRST_STATE, next_state, reward, write
from rljob.api.models import RLJobSpec
from rljob.api.resolve import DEFAULT_PROMPT
from rljob.api.tasks import Task
from rljob.api.templates import fill
from rljob.protocol.batch_samples import BatchSample, SampleTokens, Segment
from rljob.protocol.shared_messages import VersionSpan
from rljob.runner.data.reasoning_gym_source import ReasoningGymSource
from rljob.runner.tokenizer import TextCodec
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.seeds import derive

TWO_TURNS = "e2e.fakes.extensions:two_turns"


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
        trained: Counter[str] = Counter()
        while len(scalars) < spec.training.prompts_per_step * spec.training.samples_per_prompt:
            name, row = prompts.next()
            prompt = codec.encode(fill(tasks[name].prompt or DEFAULT_PROMPT, sources[name].problem("train", row)))
            group = [
                _answer(spec, tasks[name], codec, state, step, f"g{admitted}", member, prompt)
                for member in range(spec.training.samples_per_prompt)
            ]
            admitted += 1
            constant = len({sample.reward for sample, _ in group}) == 1
            accepted = not (constant and spec.algorithm.group_filter == "nonconstant")
            prompts.ended(name, accepted)
            if accepted:
                trained[name] += 1
                scalars += [sample for sample, _ in group]
                tokens += [sequence for _, sequence in group]
        prompts.settle(trained, {}, {})
        shard = msgspec.msgpack.encode(tokens)
        state = next_state(state, shard)
        yield PlainBatch(scalars, shard, state)


def _answer(
    spec: RLJobSpec, task: Task, codec: TextCodec, state: str, step: int, group: str, member: int, prompt: bytes
) -> tuple[BatchSample, SampleTokens]:
    sample, sampling, prompt_tokens = f"{group}.{member}", task.sampling, len(prompt) // 4
    tokens, logprobs, spans = b"", b"", []
    segments: list[Segment] = []
    for turn in range(2 if task.loop == TWO_TURNS else 1):
        added = codec.encode(OBSERVATION, special=False) if turn else prompt
        tokens, logprobs = tokens + added, logprobs + bytes(len(added))
        begin = len(tokens) // 4
        segments.append(Segment("observation" if turn else "prompt", begin - len(added) // 4, begin))
        seed = derive(spec.seed, sample, turn, 0)
        stream, finish = write(state, tokens, seed, sampling.max_tokens, codec.stop_token_ids)
        tokens, logprobs = tokens + stream.token_ids.tobytes(), logprobs + stream.logprobs.tobytes()
        segments.append(Segment("model", begin, len(tokens) // 4))
        spans.append(VersionSpan(step, begin, len(tokens) // 4))
    scored = segments[-1].reward = reward(codec.decode(stream.token_ids.tobytes()))
    if len(spans) > 1:
        segments[1].reward = FIRST_TURN_REWARD
        scored += FIRST_TURN_REWARD
    written = sum(span.end - span.start for span in spans)
    scalars = BatchSample(
        sample=sample,
        group=group,
        reward=scored,
        prompt_tokens=prompt_tokens,
        response_tokens=written,
        total_tokens=len(tokens) // 4,
        min_version=step,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        truncated=finish == "length",
        task=task.name,
    )
    return scalars, SampleTokens(sample, tokens, logprobs, segments, spans)
