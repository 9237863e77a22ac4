"""Text to token ids and back, by the policy's tokenizer.json alone: no transformers, no torch.

Prompts get exactly what the tokenizer's own post-processor adds (a beginning-of-sequence token where the model wants
one), nothing else; completions are decoded without special tokens. Token ids are int32 bytes, as on the wire.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TextCodec:
    """Tokenizer and stop tokens of a model directory in Hugging Face format.

    Raises:
        ValueError: the directory lacks tokenizer.json, or it is not one, or no stop token is named anywhere.
    """

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"models: {path} does not exist; the policy needs a tokenizer.json beside its weights")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"models: {path} is no tokenizer: {error}; write it with save_pretrained") from error
        self.stop_token_ids = _stop_token_ids(model)

    def encode(self, text: str) -> bytes:
        """Return the token ids of a prompt."""
        return array("i", self._tokenizer.encode(text).ids).tobytes()

    def decode(self, token_ids: bytes) -> str:
        """Return the text of a completion, special tokens left out."""
        text: str = self._tokenizer.decode(array("i", token_ids).tolist(), skip_special_tokens=True)
        return text


def _stop_token_ids(model: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        path = model / name
        if not path.is_file():
            continue
        found: Any = json.loads(path.read_bytes()).get("eos_token_id")
        if found is not None:
            return [int(token) for token in found] if isinstance(found, list) else [int(found)]
    raise ValueError(f"models: {model} names no eos_token_id in generation_config.json or config.json; add it")
