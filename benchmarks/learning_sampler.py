"""The quickstart's task in this process: problems, sampled answers and their rewards, and held-out accuracy.

Answers are sampled from the model that trains, without an engine, so a batch costs about a second of two cores.
Shapes: B answers, T positions, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import yaml
from reasoning_gym.factory import create_dataset
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from rljob.api.base import Model
from rljob.api.models import RLJobSpec
from rljob.api.templates import fill
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.data import is_held_out
from rljob.rewards.reasoning_gym_reward import ReasoningGymReward
from rljob.trainer.batch import Row

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart.yaml"
ROUNDS = 4
"""Groups with equal rewards are replaced at most so often (groupFilter: nonconstant)."""
Group: TypeAlias = tuple[list[tuple[Row, float, int]], float | None]
"""Members, each with its reward and the tokens of its prompt; and the reward of a greedy answer, if there is one."""


def quickstart() -> RLJobSpec:
    """Return the spec of the quickstart."""
    return RLJobSpec.model_validate(yaml.safe_load(QUICKSTART.read_text())["spec"])


@dataclass(frozen=True)
class Answers:
    """Samples of a batch: their scalars and tokens, in group order."""

    samples: list[BatchSample]
    rows: dict[int, Row]

    @property
    def reward(self) -> float:
        """Mean reward."""
        return float(np.mean([sample.reward for sample in self.samples]))


class Sampler:
    """Samples answers to the quickstart's problems; the same seed gives the same problems and random numbers.

    Args:
        model: directory with the tokenizer.
        seed: of problems and sampling.
    """

    def __init__(self, model: Path, seed: int) -> None:
        spec = quickstart()
        self._task, self._training = spec.tasks[0], spec.training
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._reward = ReasoningGymReward(Model(), [self._task])
        self._seed = seed
        self._problems = self._draw(2 * seed + 1, held_out=False)
        self._generator = torch.Generator().manual_seed(seed)

    def _draw(self, seed: int, held_out: bool) -> Iterator[dict[str, Any]]:
        gym = self._task.data.reasoning_gym
        assert gym is not None
        first = 10_000_000 * seed  # the dataset adds the number of the row to its seed
        for row in create_dataset(gym.dataset, **{**gym.config, "seed": first, "size": 9_000_000}):
            if is_held_out(row["question"]) == held_out:
                yield row

    def batch(self, model: PreTrainedModel, version: int, filtered: bool, greedy: bool = False) -> Answers:
        """Return a batch of the quickstart's size.

        Args:
            model: the policy.
            version: of its weights.
            filtered: whether groups with equal rewards are replaced.
            greedy: whether the reward of a greedy answer is the baseline of each group.
        """
        kept: list[Group] = []
        rejected: list[Group] = []
        size, members = self._training.prompts_per_step, self._training.samples_per_prompt
        for _ in range(ROUNDS if filtered else 1):
            problems = [next(self._problems) for _ in range(size - len(kept))]
            answered = self._answer(model, [problem for problem in problems for _ in range(members)], self._generator)
            best = self._answer(model, problems, self._generator, greedy=True) if greedy else []
            baselines = [reward for _, reward, _ in best] or [None] * len(problems)
            for number, baseline in enumerate(baselines):
                group = answered[number * members : (number + 1) * members]
                constant = len({reward for _, reward, _ in group}) == 1
                (rejected if filtered and constant else kept).append((group, baseline))
            if len(kept) == size:
                break
        return self._as_batch((kept + rejected)[:size], version)

    def _as_batch(self, groups: Sequence[Group], version: int) -> Answers:
        samples, rows = [], {}
        for number, (group, baseline) in enumerate(groups):
            for member, (row, reward, prompt) in enumerate(group):
                rows[len(samples)] = row
                samples.append(
                    BatchSample(
                        sample=f"{number}.{member}",
                        group=str(number),
                        reward=reward,
                        prompt_tokens=prompt,
                        response_tokens=int(row.mask_L.sum()),
                        total_tokens=len(row.mask_L),
                        min_version=version,
                        temperature=self._task.sampling.temperature,
                        max_tokens=self._task.sampling.max_tokens,
                        baseline=baseline,
                    )
                )
        return Answers(samples, rows)

    def accuracy(self, model: PreTrainedModel, problems: int) -> float:
        """Return the share of right answers to held-out problems, always the same ones with the same random numbers."""
        source = self._draw(2 * self._seed, held_out=True)
        chosen = [next(source) for _ in range(problems)]
        answered = self._answer(model, chosen, torch.Generator().manual_seed(self._seed + 1))
        return float(np.mean([reward for _, reward, _ in answered]))

    def _answer(
        self,
        model: PreTrainedModel,
        problems: Sequence[dict[str, Any]],
        generator: torch.Generator,
        greedy: bool = False,
    ) -> list[tuple[Row, float, int]]:
        """Return a sample, or the greedy answer, its reward and the tokens of its prompt for each problem."""
        assert self._task.prompt is not None
        texts = [fill(self._task.prompt, problem) for problem in problems]
        prompts = self._tokenizer(texts)["input_ids"]
        end, sampling = self._tokenizer.eos_token_id, self._task.sampling
        temperature = 0.0 if greedy else sampling.temperature
        answers = generate(model, prompts, sampling.max_tokens, end, temperature, generator)
        found = []
        for problem, prompt, (tokens, logprobs) in zip(problems, prompts, answers, strict=True):
            text = self._tokenizer.decode(tokens[:-1] if tokens[-1] == end else tokens)
            reward, _ = self._reward(completion=text, problem=problem, task=self._task.name)
            ids = np.array([*prompt, *tokens], np.int64)
            mask = np.arange(len(ids)) >= len(prompt)
            behavior, rewards = np.zeros(len(ids), np.float32), np.zeros(len(ids))
            behavior[mask], rewards[-1] = logprobs, reward
            found.append((Row(ids, behavior, mask, rewards), reward, len(prompt)))
        return found


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    most: int,
    end: int,
    temperature: float,
    generator: torch.Generator,
) -> list[tuple[list[int], list[float]]]:
    """Return sampled tokens, the ending one included, and their log-probabilities for each prompt.

    Args:
        model: the policy.
        prompts: token ids; padded on the left.
        most: maximum number of new tokens.
        end: token that ends an answer.
        temperature: of the softmax; 0: greedy.
        generator: of random numbers.
    """
    longest = max(map(len, prompts))
    tokens_BT = torch.full((len(prompts), longest), end)
    mask_BT = torch.zeros(len(prompts), longest, dtype=torch.long)
    for b, prompt in enumerate(prompts):
        tokens_BT[b, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BT[b, longest - len(prompt) :] = 1
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    ended_B = torch.zeros(len(prompts), dtype=torch.bool)
    written: list[Tensor] = []
    logprobs: list[Tensor] = []
    cache = None
    for _ in range(most):
        output = model(
            input_ids=tokens_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        cache = output.past_key_values
        logprobs_BV = (output.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
        if temperature:
            tokens_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        else:
            tokens_BT = logprobs_BV.argmax(-1, keepdim=True)
        written.append(tokens_BT[:, 0].where(~ended_B, -1))
        logprobs.append(logprobs_BV.gather(-1, tokens_BT)[:, 0])
        ended_B |= tokens_BT[:, 0] == end
        if ended_B.all():
            break
        mask_BT = torch.cat([mask_BT, torch.ones_like(tokens_BT)], -1)
        positions_BT = positions_BT[:, -1:] + 1
    answers = []
    for tokens, each in zip(torch.stack(written, -1).tolist(), torch.stack(logprobs, -1).tolist(), strict=True):
        kept = [token for token in tokens if token >= 0]
        answers.append((kept, each[: len(kept)]))
    return answers
