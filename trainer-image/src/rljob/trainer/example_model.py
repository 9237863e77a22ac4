"""The quickstart's initializer: a tiny language model, initialised at random and warmed up by supervised training.

``rljob-example-model DIRECTORY`` reads the job's first task (RLJOB_JOB), trains a tokenizer on its prompts and a
Qwen2-architecture model of 370,048 parameters on the examples of rljob.trainer.example_problems, and writes both as one
Hugging Face directory, atomically. The same seed (RLJOB_SEED) on the same machine gives the same model.
Legend of tensor names: B examples, T tokens, D hidden size.
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
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from rljob.api.tasks import Task
from rljob.protocol.environment import SEED, read_environment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.trainer.example_episodes import Segments, draw_episodes
from rljob.trainer.example_muon import Float32Muon
from rljob.trainer.example_problems import draw_problems, make_examples

log = logging.getLogger(__name__)

END = "<|endoftext|>"
CHAT = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END + "{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""Chat template for a task with an agent: a message of the user is a prompt of the quickstart."""
TOKENIZER_ENTRIES = 315
BYTES = 257
"""Entries of a tokenizer without merges: bytes and END. In an environment every symbol is one token."""
LONGEST = 512  # tokens of a sequence


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the warm-up: they work for every seed tried, within half a minute on two cores."""

    working_steps: int = 900
    """Optimizer steps of the first phase: all answers are worked."""
    bare_steps: int = 150
    """Optimizer steps of the second phase."""
    bare: float = 0.7
    """Fraction of bare answers in the second phase."""
    batch: int = 16
    """Examples per step; each is used once."""
    matrix_rate: float = 0.012
    """Highest learning rate of Muon, which trains the matrices."""
    rate: float = 3e-3
    """Highest learning rate of AdamW, which trains the rest. Both rise over warm_up_steps and fall linearly to 0."""
    warm_up_steps: int = 50


IN_ENVIRONMENT = Recipe(working_steps=100, bare_steps=0, batch=32)
"""Hyperparameters in an environment: scripted episodes, which the model imitates with as many mistakes."""


def train_tokenizer(texts: list[str], entries: int = TOKENIZER_ENTRIES) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer of at most ``entries`` entries that knows the words of ``texts``."""
    blank = Qwen2Tokenizer(unk_token=END, eos_token=END, pad_token=END, model_max_length=LONGEST)
    return blank.train_new_from_iterator(texts, entries, show_progress=False)


def check_tokenizer(directory: Path, tokenizer: Qwen2Tokenizer, texts: list[str]) -> None:
    """Check that the tokenizer read back from ``directory`` is the one that was trained.

    For model type qwen2 AutoTokenizer ignores the pipeline in the file and rebuilds that of Qwen2, which silently
    breaks any other kind of tokenizer.

    Raises:
        ValueError: AutoTokenizer or tokenizer.json gives other tokens, or the text does not come back.
    """
    auto, plain = AutoTokenizer.from_pretrained(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if not (ids == auto(text)["input_ids"] == plain.encode(text).ids and auto.decode(ids) == text):
            raise ValueError(f"the tokenizer written to {directory} encodes {text!r} differently from the trained one")


def make_model(end: int) -> Qwen2ForCausalLM:
    """Return the untrained model; ``end`` is the token that ends an answer.

    With the usual initializer_range of 0.02, or with fewer key-value heads, the model learns much more slowly.
    """
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=True)
    return model


def make_batches(
    tokenizer: Qwen2Tokenizer, examples: list[Segments], size: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token_ids_BT, padded on the right, and answer_mask_BT, every example once.

    Examples of similar length share a batch, which saves a fifth of the tokens.
    """
    encoded = iter(tokenizer([text for segments in examples for text, _ in segments])["input_ids"])
    rows = [[(next(encoded), answer) for _, answer in segments] for segments in examples]
    for start in range(0, len(rows), 16 * size):
        pool = sorted(rows[start : start + 16 * size], key=lambda row: sum(len(ids) for ids, _ in row))
        batches = [pool[i : i + size] for i in range(0, len(pool), size)]
        for batch in rng.sample(batches, len(batches)):
            yield pad(batch)


def pad(rows: list[list[tuple[list[int], bool]]]) -> tuple[Tensor, Tensor]:
    """Return token_ids_BT, padded on the right with 0, and answer_mask_BT of rows of token ids; True: an answer."""
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for b, row in enumerate(rows):
        begin = 0
        for ids, answer in row:
            ids_BT[b, begin : begin + len(ids)] = torch.tensor(ids, dtype=torch.long)
            mask_BT[b, begin : begin + len(ids)] = answer
            begin += len(ids)
    return ids_BT, mask_BT


def answer_loss(model: Qwen2ForCausalLM, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens. Padding is on the right, so it needs no attention mask."""
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    mask_BT = mask_BT[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden_BTD[mask_BT]), ids_BT[:, 1:][mask_BT])


def warm_up(model: Qwen2ForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], steps: int, recipe: Recipe) -> None:
    """Train ``model`` on ``steps`` batches.

    Muon needs half as many steps as AdamW, with no slow seed.
    """
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [*model.model.embed_tokens.parameters(), *(p for p in model.model.parameters() if p.ndim == 1)]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Float32Muon(matrices, recipe.matrix_rate, weight_decay=0.01), recipe.matrix_rate),
        (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01, fused=True), recipe.rate),
    ]
    started = time.monotonic()
    for step, (ids_BT, mask_BT) in enumerate(batches, start=1):
        loss = answer_loss(model, ids_BT, mask_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, step / recipe.warm_up_steps, (steps + 1 - step) / max(1, steps - recipe.warm_up_steps))
        for optimizer, highest in optimizers:
            optimizer.param_groups[0]["lr"] = highest * rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.monotonic() - started
            log.info("warm start: step %d of %d, loss %.3f, %.0f s", step, steps, loss.item(), seconds)


def make_segments(task: Task, seed: int, recipe: Recipe) -> list[Segments]:
    """Return the examples of both phases, or the episodes of an environment.

    Raises:
        ValueError: the initializer does not support the task.
    """
    if task.environment is not None:
        return draw_episodes(task, (recipe.working_steps + recipe.bare_steps) * recipe.batch, seed, END)
    problems = draw_problems(task, seed)
    examples = make_examples(problems, recipe.working_steps * recipe.batch, bare=0, seed=seed)
    examples += make_examples(problems, recipe.bare_steps * recipe.batch, bare=recipe.bare, seed=seed)
    return [[(example.prompt, False), (example.answer + END, True)] for example in examples]


def build(directory: Path, task: Task, seed: int, recipe: Recipe | None = None) -> None:
    """Make the model for ``task`` and write it to ``directory``, replacing an existing one.

    Raises:
        ValueError: the initializer does not support the task, or the written tokenizer differs from the trained one.
    """
    recipe = recipe or (Recipe() if task.environment is None else IN_ENVIRONMENT)
    torch.manual_seed(seed)
    examples = make_segments(task, seed, recipe)
    working = examples[: min(4000, recipe.working_steps * recipe.batch)]
    texts = [text.removesuffix(END) for segments in working for text, _ in segments]
    tokenizer = train_tokenizer(texts, TOKENIZER_ENTRIES if task.environment is None else BYTES)
    if task.agent is not None:
        tokenizer.chat_template = CHAT
    model = make_model(tokenizer.eos_token_id)

    draft = directory.with_name(f".{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.config.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    check_tokenizer(draft, tokenizer, texts[:400])

    batches = make_batches(tokenizer, examples, recipe.batch, random.Random(seed))
    warm_up(model, batches, recipe.working_steps + recipe.bare_steps, recipe)
    model.save_pretrained(draft)
    if directory.exists():
        shutil.rmtree(directory)
    draft.rename(directory)
    log.info("wrote %s", directory)


def main() -> None:
    """Entry point of rljob-example-model; exit with code 2 if it does not support the job."""
    parser = argparse.ArgumentParser(description="Make the quickstart's tiny model.")
    parser.add_argument("directory", type=Path, help="where to write it")
    directory = parser.parse_args().directory
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    disable_progress_bar()
    try:
        job = read_environment().job
        build(directory, job.spec.tasks[0], seed=int(os.environ.get(SEED, job.spec.seed)))
    except ValueError as error:
        log.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
