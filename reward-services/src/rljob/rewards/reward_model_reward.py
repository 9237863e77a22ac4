"""Scorer of the reward ``reward_model``: an output of a sequence classification model. Needs torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rljob.api.rewards import NotScored, batch
from rljob.api.rewards.kinds.reward_model import RewardModelOptions
from rljob.api.tasks import Task
from rljob.api.templates import text_of


class RewardModelReward:
    """Scores the samples of a chunk in one forward pass, padded on the right.

    On the CPU the model is loaded once, before the workers are forked, which then share its memory. A process that has
    used CUDA cannot be forked, so for a GPU each worker loads its own.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.

    Raises:
        ValueError: the directory has no such model, its tokenizer has no chat template, or it lacks the label.
    """

    def __init__(self, options: RewardModelOptions, tasks: Sequence[Task]) -> None:
        assert options.model is not None
        self._options, self._directory = options, options.model
        if not (Path(options.model) / "config.json").is_file():
            raise ValueError(f"model {options.model} is no directory of a model: it lacks config.json; correct it")
        torch.set_num_threads(1)  # a worker is a process; threads of the service would not survive the fork
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._directory, local_files_only=True)
        if options.format == "chat" and not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {options.model} has no chat template; set format: text")
        self._model: Any = None
        if options.device == "cpu":
            self._load()

    def set_up(self) -> None:
        """Load the model in a worker, if it is for a GPU."""
        if self._model is None:
            self._load()

    @batch
    def __call__(
        self, *, prompt: list[str], completion: list[str], problem: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]] | NotScored]:
        """Return a reward and its metric ``tokens`` for each sample; NotScored for one that is too long."""
        tokens = [self._tokens(*sample) for sample in zip(prompt, completion, problem, strict=True)]
        short = [i for i, each in enumerate(tokens) if len(each) <= self._options.max_tokens]
        rewards = dict(zip(short, self._rewards([tokens[i] for i in short]), strict=True))
        too_long = "the sample has {:,} tokens, and maxTokens is {:,}"
        return [
            (rewards[i], {"tokens": float(len(each))})
            if i in rewards
            else NotScored(too_long.format(len(each), self._options.max_tokens))
            for i, each in enumerate(tokens)
        ]

    def _load(self) -> None:
        options = self._options
        self._model = AutoModelForSequenceClassification.from_pretrained(self._directory, local_files_only=True).eval()
        if options.label >= self._model.config.num_labels:
            raise ValueError(f"label {options.label}: the model has {self._model.config.num_labels} labels; lower it")
        self._pad = self._padding()
        self._model.config.pad_token_id = self._pad  # the model finds the last token of a padded row by it
        self._model.to(options.device)

    def _padding(self) -> int:
        """Return the token for padding; one that a tokenizer has and its model lacks cannot be used."""
        known = (self._model.config.pad_token_id, self._tokenizer.pad_token_id, self._tokenizer.eos_token_id)
        for token in known:
            if token is not None and 0 <= token < self._model.config.vocab_size:
                return int(token)
        raise ValueError(f"{self._directory} has neither a padding nor an end token; add one to its config.json")

    def _tokens(self, prompt: str, completion: str, problem: dict[str, Any]) -> list[int]:
        question = prompt if self._options.column is None else text_of(problem, self._options.column)
        if self._options.format == "text":
            return list(self._tokenizer(question + completion)["input_ids"])
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        return list(self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])

    def _rewards(self, rows: list[list[int]]) -> list[float]:
        if not rows:
            return []
        longest = max(map(len, rows))
        ids_BT = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows])
        mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            device = self._options.device
            logits_BL = self._model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device)).logits.float()
        if self._options.activation == "sigmoid":
            logits_BL = logits_BL.sigmoid()
        elif self._options.activation == "softmax":
            logits_BL = logits_BL.softmax(-1)
        found: list[float] = logits_BL[:, self._options.label].tolist()
        return found
