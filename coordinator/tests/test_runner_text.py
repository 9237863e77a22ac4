"""Prompts to token ids and completions back to text."""

import asyncio
import json
import threading
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from rljob.api.models import Task
from rljob.runner.prompts import PromptBook, render
from rljob.runner.text import TextCodec


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<end>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer, **files: dict) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (files or {"config": {"eos_token_id": 0}}).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_text_goes_to_tokens_and_back(tmp_path: Path) -> None:
    codec = TextCodec(write_model(tmp_path, byte_tokenizer()))
    assert codec.decode(codec.encode("3 + 4 = né\n")) == "3 + 4 = né\n"


def test_special_tokens_are_left_out_of_a_completion(tmp_path: Path) -> None:
    codec = TextCodec(write_model(tmp_path, byte_tokenizer()))
    assert codec.decode(codec.encode("7") + array("i", [0]).tobytes()) == "7"


def test_a_prompt_gets_the_special_tokens_of_the_tokenizer_itself_and_no_others(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    plain = array("i", tokenizer.encode("1").ids)
    assert TextCodec(write_model(tmp_path, tokenizer)).encode("1") == plain.tobytes()
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    assert TextCodec(write_model(tmp_path, tokenizer)).encode("1") == array("i", [0, *plain]).tobytes()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 5}}, [5]),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 7]}}, [6, 7]),
        ({"config": {"eos_token_id": 5}, "generation_config": {}}, [5]),
    ],
)
def test_stop_tokens_are_those_of_the_generation_config_then_of_the_config(
    tmp_path: Path, files: dict, expected: list[int]
) -> None:
    assert TextCodec(write_model(tmp_path, byte_tokenizer(), **files)).stop_token_ids == expected


def test_a_model_without_stop_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no eos_token_id"):
        TextCodec(write_model(tmp_path, byte_tokenizer(), config={}))


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist"):
        TextCodec(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        TextCodec(tmp_path)


def test_other_braces_in_a_template_stay() -> None:
    assert render('{"q": "{question}"} {x}\n', "a {b}") == '{"q": "a {b}"} {x}\n'


class CountingSource:
    """Gives row r the question ``r?``; raises for row 13."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.threads: set[str] = set()

    def problem(self, split: str, row: int) -> dict:
        self.rows.append(row)
        self.threads.add(threading.current_thread().name)
        if row == 13:
            raise RuntimeError("no such problem")
        return {"question": f"{row}?", "answer": "", "metadata": {}}


class Bytes:
    def encode(self, text: str) -> bytes:
        return text.encode()


def task() -> Task:
    data = {"reasoningGym": {"dataset": "chain_sum"}}
    return Task.model_validate({"name": "sums", "data": data, "prompt": "Q: {question}\n", "reward": "sums"})


async def test_a_group_shares_one_prompt_made_off_the_event_loop() -> None:
    source = CountingSource()
    book = PromptBook({"sums": source}, {"sums": task()}, Bytes())
    prompts = await asyncio.gather(*(book.prompt("sums", "train", 4) for _ in range(8)))
    book.close()
    assert {prompt.text for prompt in prompts} == {"Q: 4?\n"}
    assert source.rows == [4]
    assert threading.current_thread().name not in source.threads


async def test_a_problem_that_cannot_be_made_fails_all_who_wait_and_is_tried_again_later() -> None:
    source = CountingSource()
    book = PromptBook({"sums": source}, {"sums": task()}, Bytes())
    failed = await asyncio.gather(*(book.prompt("sums", "train", 13) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in failed] == ["no such problem"] * 3
    with pytest.raises(RuntimeError):
        await book.prompt("sums", "train", 13)
    book.close()
    assert source.rows == [13, 13]


async def test_cancelling_one_member_does_not_disturb_the_others() -> None:
    source = CountingSource()
    book = PromptBook({"sums": source}, {"sums": task()}, Bytes())
    members = [asyncio.create_task(book.prompt("sums", "train", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    members[0].cancel()
    kept = await asyncio.gather(*members[1:])
    book.close()
    assert [prompt.text for prompt in kept] == ["Q: 1?\n"] * 2
