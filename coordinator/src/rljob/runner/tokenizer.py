"""Encodes and decodes text with the policy's tokenizer.json, without transformers or torch.

A plain prompt gets exactly the special tokens that the tokenizer's post-processor adds (for example a
beginning-of-sequence token). A rendered chat gets none, because chat templates write these tokens themselves.
Completions are decoded without special tokens. Token ids are int32 bytes, as on the wire.

Text is never re-tokenized, so ids → text → ids need not give the same ids. Text → ids → text must keep the content,
because rewards and users read the decoded text. Case, accents, white space and Unicode forms may change (tokenizers
that lowercase or normalize are valid); letters, digits and signs must not be lost.
"""

from __future__ import annotations

import itertools
import logging
import unicodedata
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rljob.runner.model_files import read_object

log = logging.getLogger(__name__)


class TextCodec:
    """Tokenizer and stop tokens of a model directory in Hugging Face format.

    Raises:
        ValueError: tokenizer.json is missing or invalid or has more tokens than the model, the model names no stop
            token, or a stop token is outside the model's vocabulary.
    """

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist; the policy needs a tokenizer.json beside its weights")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}; write it with save_pretrained") from error
        self._tokenizer.no_truncation()  # some files enable truncation; a prompt must not be cut
        self._tokenizer.no_padding()
        self._path = path
        config = read_object(model / "config.json")
        self.stop_token_ids = _stop_token_ids(model, config)
        self._check_size(model, config)

    def encode(self, text: str, special: bool = True) -> bytes:
        """Return the token ids of a prompt; with ``special``, the special tokens of the post-processor are added."""
        return array("i", self._tokenizer.encode(text, add_special_tokens=special).ids).tobytes()

    def decode(self, token_ids: bytes) -> str:
        """Return the text of a completion without special tokens."""
        text: str = self._tokenizer.decode(array("i", token_ids).tolist(), skip_special_tokens=True)
        return text

    def check_round_trip(self, texts: Iterable[str]) -> None:
        """Check that encoding and decoding keep the content of some prompts; log a warning if the form of one changes.

        Raises:
            ValueError: the tokenizer loses content.
        """
        changed = {}
        for text in texts:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            back: str = self._tokenizer.decode(ids, skip_special_tokens=False)
            if _content(back) != _content(text):
                raise ValueError(
                    f"{self._path}: the tokenizer does not survive its round trip: {_short(text)} comes back as "
                    f"{_short(back)}; give a model whose tokenizer knows the text of the prompts"
                )
            if back.strip() != text.strip():
                changed[text] = back
        for text, back in itertools.islice(changed.items(), 1):
            log.warning("%s: the tokenizer changes text: %s comes back as %s", self._path, _short(text), _short(back))

    def check_stop(self, stop: str) -> None:
        """Check that a stop string can occur in a text that is decoded without special tokens.

        Raises:
            ValueError: it contains the text of a special token.
        """
        for token in self._tokenizer.get_added_tokens_decoder().values():
            if token.special and token.content in stop:
                raise ValueError(
                    f"{_short(stop)} contains the special token {_short(token.content)}, which the text of an answer "
                    "does not have; give other text, or name the token in eos_token_id of generation_config.json"
                )

    def _check_size(self, model: Path, config: dict[str, Any]) -> None:
        size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if isinstance(size, int) and last >= size:
            raise ValueError(
                f"{self._path} has token ids up to {last}, and the model's vocab_size is {size}; "
                "give the model its own tokenizer, or resize its embedding"
            )
        for token in self.stop_token_ids:
            if token < 0 or (isinstance(size, int) and token >= size):
                raise ValueError(
                    f"{model}: eos_token_id {token} is beyond the vocabulary of {size}; name the token that ends an "
                    "answer in generation_config.json or config.json"
                )


def _stop_token_ids(model: Path, config: dict[str, Any]) -> list[int]:
    for named in (read_object(model / "generation_config.json"), config):
        found = named.get("eos_token_id")
        if found is not None:
            return [int(token) for token in found] if isinstance(found, list) else [int(found)]
    raise ValueError(f"{model} names no eos_token_id in generation_config.json or config.json; add it")


def _content(text: str) -> str:
    """Return the letters, digits and signs of ``text``, without case, accents and differences of Unicode form."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(character for character in plain if unicodedata.category(character)[0] not in "MZC")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")
