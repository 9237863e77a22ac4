"""A tokenizer in which each token is a letter."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

FIRST = 0x100
"""Code point of token 0."""


def write_letters(model: Path, vocabulary: int) -> Tokenizer:
    """Write tokenizer.json with ``vocabulary`` tokens into ``model``, and return the tokenizer."""
    tokenizer = Tokenizer(WordLevel({chr(FIRST + token): token for token in range(vocabulary)}, unk_token=chr(FIRST)))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    return tokenizer
