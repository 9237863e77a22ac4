"""TRL's side of benchmarks.peers: trains with GRPOTrainer and writes the end and the mean reward of each step.

Runs in the environment of requirements/peers.txt, which has no rljob. Its one argument is a JSON object, made by
benchmarks.peers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from reasoning_gym.factory import get_score_answer_fn
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers_reward import bit

POSITIONS = 8192
"""Of a microbatch: about as many as rljob's, so that the memory of both is alike."""


class Clock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.seconds.append(time.perf_counter())


class EndsRows(LogitsProcessor):
    """Ends each row at the length of its prompt, and no row before. Made for each call of generate.

    Args:
        lengths: tokens of a prompt → tokens of its answers.
        end: id of the token that ends an answer.
    """

    def __init__(self, lengths: dict[tuple[int, ...], int], end: int) -> None:
        self._lengths = lengths
        self._end = end
        self._start = 0
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            self._start = input_ids.shape[1]
            prompts = [tuple(token for token in row if token != self._end) for row in input_ids.tolist()]
            self._last = torch.tensor([self._lengths[prompt] - 1 for prompt in prompts])
        ends = self._last <= input_ids.shape[1] - self._start
        scores[:, self._end] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self._end] = 0.0
        return scores


def main() -> None:
    """Train, and write the result."""
    options = json.loads(sys.argv[1])
    rows = json.loads(Path(options["rows"]).read_text())
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options["model"], padding_side="left")
    samples = options["prompts"] * options["group"]
    microbatch = samples
    if "length" in rows[0]:
        lengths = {tuple(tokenizer(row["prompt"])["input_ids"]): row["length"] for row in rows}
        _end_rows(model, lengths, tokenizer.eos_token_id)
        microbatch = POSITIONS // options["longest"]
    rewards: list[float] = []

    def score(row: dict[str, Any], text: str) -> float:
        if "length" in row:
            return bit(text)
        return float(get_score_answer_fn(options["reasoning_gym"])(extract_answer(text), row["entry"]))

    def reward(completions: list[str], row: list[str], **_: Any) -> list[float]:
        scores = [score(json.loads(one), text) for one, text in zip(row, completions, strict=True)]
        rewards.append(sum(scores) / len(scores))
        return scores

    clock = Clock()
    settings = GRPOConfig(
        output_dir=options["output"],
        seed=options["seed"],
        learning_rate=options["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=options["steps"],
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=samples // microbatch,
        num_generations=options["group"],
        max_completion_length=options["longest"],
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        save_strategy="no",
        report_to="none",
        logging_steps=1000,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "row": json.dumps(row)} for row in rows]),
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[clock],
    )
    trainer.train()
    Path(options["result"]).write_text(json.dumps({"seconds": clock.seconds, "rewards": rewards[: len(clock.seconds)]}))


def _end_rows(model: Any, lengths: dict[tuple[int, ...], int], end: int) -> None:
    generate = model.generate

    def ended(*arguments: Any, **options: Any) -> Any:
        return generate(*arguments, logits_processor=LogitsProcessorList([EndsRows(lengths, end)]), **options)

    model.generate = ended
