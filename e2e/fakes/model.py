"""Writes a policy directory without weights: a byte-level tokenizer and a stop token, enough for runner and fakes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STOP = 0


def write_model(directory: Path) -> None:
    """Write tokenizer.json and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": STOP}))


@functools.cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer: a token for each byte, and one that ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": STOP} | {character: i + 1 for i, character in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made
