"""The quickstart's initializer: a tiny language model, made from nothing and warmed up by supervised training.

``rljob-example-model DIRECTORY`` reads the job's first task (RLJOB_JOB), trains a tokenizer on its prompts and a
Qwen2-architecture model of 337,024 parameters on worked answers, and writes both as one Hugging Face directory, whole
or not at all. The same seed (RLJOB_SEED) and machine give the same model. Held-out questions are never trained on.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from reasoning_gym.factory import create_dataset
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen2Tokenizer

from rljob.api.models import Task
from rljob.protocol.data import is_held_out
from rljob.protocol.environment import read_environment

log = logging.getLogger(__name__)

END = "<|endoftext|>"
TOKENIZER_ENTRIES = 315
MAX_TOKENS = 512


@dataclass(frozen=True)
class Recipe:
    """How the model is warmed up."""

    problems: int = 8_000
    steps: int = 1_150
    """Optimizer steps."""
    careless_steps: int = 150
    """The last so many steps are taught by a careless teacher."""
    batch: int = 16
    """Examples of a step."""
    learning_rate: float = 3e-3
    """Highest; it rises over warm_up_steps and then falls linearly to 0."""
    warm_up_steps: int = 50


@dataclass(frozen=True)
class Problem:
    """A prompt with the arithmetic in it, for example '2 - 3 + 7'."""

    prompt: str
    expression: str


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of the answer to learn, which ends with END."""

    prompt: list[int]
    answer: list[int]


def draw_problems(task: Task, seed: int, count: int) -> list[Problem]:
    """Return ``count`` problems of the task that are not held out.

    Raises:
        ValueError: the task is not chain_sum, the one kind this teacher can work out, or has too few problems.
    """
    gym = task.data.reasoning_gym
    if gym.dataset != "chain_sum":
        raise ValueError(f"task {task.name!r} is {gym.dataset!r}; this initializer teaches chain_sum only")
    problems: list[Problem] = []
    for row in create_dataset(gym.dataset, **{**gym.config, "seed": seed, "size": 2 * count}):
        if len(problems) == count:
            break
        if not is_held_out(row["question"]):
            prompt = task.prompt.replace("{question}", row["question"])
            problems.append(Problem(prompt, row["metadata"]["expression"]))
    return problems


def work_out(expression: str, careless: random.Random | None = None) -> str:
    """Return the worked answer: '2-3=-1;-1+7=6;<answer>6</answer>' for '2 - 3 + 7'.

    With ``careless`` each step is off by 1 to 3 with probability 0.35 and the rest consistent with it.
    """
    first, *rest = expression.split()
    total, steps = int(first), []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        left = total
        total += int(operand) if operator == "+" else -int(operand)
        if careless is not None and careless.random() < 0.35:
            total += careless.choice((-3, -2, -1, 1, 2, 3))
        steps.append(f"{left}{operator}{operand}={total};")
    return "".join(steps) + f"<answer>{total}</answer>"


def train_tokenizer(texts: list[str]) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer of at most TOKENIZER_ENTRIES entries that knows the words of ``texts``."""
    blank = Qwen2Tokenizer(unk_token=None, eos_token=END, pad_token=END, model_max_length=MAX_TOKENS)
    return blank.train_new_from_iterator(texts, TOKENIZER_ENTRIES, show_progress=False)


def check_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    """Check that the tokenizer read back from ``directory`` is the one that was trained.

    With model type qwen2 AutoTokenizer rebuilds Qwen2's own pipeline whatever the file says, and a tokenizer of any
    other kind is silently ruined.

    Raises:
        ValueError: AutoTokenizer or tokenizer.json gives other tokens, or the text does not come back.
    """
    auto, plain = AutoTokenizer.from_pretrained(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if not (ids == auto(text)["input_ids"] == plain.encode(text).ids and auto.decode(ids) == text):
            raise ValueError(f"the tokenizer written to {directory} reads {text!r} otherwise than the one trained")


def make_examples(tokenizer: PreTrainedTokenizerBase, problems: list[Problem], answers: list[str]) -> list[Example]:
    """Return the token ids of problems and answers."""
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    worked = tokenizer([answer + END for answer in answers])["input_ids"]
    return [Example(prompt, answer) for prompt, answer in zip(prompts, worked, strict=True)]


def batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token_ids_BT, padded on the right, and answer_mask_BT for ever, every example once a pass.

    Examples of about one length share a batch, which saves a fifth of the tokens.
    """
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        pools = [order[i : i + 16 * size] for i in range(0, len(order), 16 * size)]
        for pool in pools:
            pool.sort(key=lambda i: len(examples[i].prompt) + len(examples[i].answer))
            starts = list(range(0, len(pool) - size + 1, size))
            for start in rng.sample(starts, len(starts)):
                yield pad([examples[i] for i in pool[start : start + size]])


def pad(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Return token_ids_BT, padded on the right with END (0 or whatever: masked), and answer_mask_BT."""
    longest = max(len(example.prompt) + len(example.answer) for example in examples)
    ids_BT = torch.zeros(len(examples), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        start, end = len(example.prompt), len(example.prompt) + len(example.answer)
        ids_BT[row, :end] = torch.tensor(example.prompt + example.answer)
        mask_BT[row, start:end] = True
    return ids_BT, mask_BT


def answer_loss(model: Qwen2ForCausalLM, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens. No attention mask is needed: padding is on the right."""
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    target_BT = mask_BT[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden_BTD[target_BT]), ids_BT[:, 1:][target_BT])


def make_model(end: int) -> Qwen2ForCausalLM:
    """Return the untrained model. With initializer_range 0.02 instead of 0.06 it learns far more slowly."""
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return Qwen2ForCausalLM(config)


def warm_up(model: Qwen2ForCausalLM, lessons: list[tuple[int, list[Example]]], recipe: Recipe, seed: int) -> None:
    """Train ``model`` on each lesson, (steps, examples), in turn under one learning-rate schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    started, step, steps = time.monotonic(), 0, sum(count for count, _ in lessons)
    for count, examples in lessons:
        source = batches(examples, recipe.batch, random.Random(seed))
        for _ in range(count):
            rate = min((step + 1) / recipe.warm_up_steps, (steps - step) / (steps - recipe.warm_up_steps))
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * rate
            loss = answer_loss(model, *next(source))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 100 == 0:
                seconds = time.monotonic() - started
                log.info("warm start: step %d of %d, loss %.3f, %.0f s", step, steps, loss.item(), seconds)


def build(directory: Path, task: Task, seed: int, recipe: Recipe = Recipe()) -> None:
    """Make the model for ``task`` and write it to ``directory``, replacing what is there.

    Raises:
        ValueError: the task is not one this initializer can teach, or the tokenizer does not survive writing.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    problems = draw_problems(task, seed=rng.randrange(2**31), count=recipe.problems)
    answers = [work_out(problem.expression) for problem in problems]
    careless = [work_out(problem.expression, rng) for problem in problems]
    prompts = [problem.prompt for problem in problems]
    tokenizer = train_tokenizer(prompts + answers)
    end = tokenizer.eos_token_id
    model = make_model(end)

    draft = directory.with_name(f".{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    model.config.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    check_tokenizer(draft, tokenizer, prompts[:200] + answers[:200])

    correct_steps = recipe.steps - recipe.careless_steps
    lessons = [
        (correct_steps, make_examples(tokenizer, problems, answers)),
        (recipe.careless_steps, make_examples(tokenizer, problems, careless)),
    ]
    warm_up(model, lessons, recipe, seed)

    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=True)
    model.save_pretrained(draft)
    if directory.exists():
        shutil.rmtree(directory)
    draft.rename(directory)
    log.info("wrote %s", directory)


def main() -> None:
    """Entry point of rljob-example-model."""
    parser = argparse.ArgumentParser(description="Make the quickstart's tiny model.")
    parser.add_argument("directory", type=Path, help="where to write it")
    directory = parser.parse_args().directory
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    job = read_environment().job
    build(directory, job.spec.tasks[0], seed=int(os.environ.get("RLJOB_SEED", job.spec.seed)))
