"""Prompts to token ids and completions back to text."""

import asyncio
import json
import threading
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rljob.api.tasks import Task
from rljob.runner.prompts import PromptCache, PromptMaker
from rljob.runner.tokenizer import TextCodec


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


def test_a_prompt_is_never_truncated_or_padded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    codec = TextCodec(write_model(tmp_path, tokenizer))
    assert (len(codec.encode("123456789")), len(codec.encode("1"))) == (36, 4)


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
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        TextCodec(tmp_path)


def word_tokenizer(*words: str) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def test_a_tokenizer_that_keeps_every_text_is_accepted_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TextCodec(write_model(tmp_path, byte_tokenizer())).check_round_trip(["1 + 1 =", "né\n<end>", ""])
    assert not caplog.records


def test_a_tokenizer_that_changes_only_the_form_of_text_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codec = TextCodec(write_model(tmp_path, word_tokenizer("cafe", "##s", ",", "two")))
    codec.check_round_trip(["Two  Cafés,", "two cafe", "CAFE"])
    (record,) = caplog.records
    assert record.message.endswith("the tokenizer changes text: 'Two  Cafés,' comes back as 'two cafes,'")


def test_a_tokenizer_that_adds_a_space_before_the_first_word_is_accepted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0), ("▁", -2.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    codec = TextCodec(write_model(tmp_path, tokenizer))
    codec.check_round_trip(["a b", "ab"])
    with pytest.raises(ValueError, match="does not survive its round trip: 'a c' comes back as"):
        codec.check_round_trip(["a c"])


@pytest.mark.parametrize(
    ("tokenizer", "back"),
    [
        pytest.param(word_tokenizer("two"), "two [UNK]", id="an unknown token"),
        pytest.param(
            Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("two ")}, merges=[])),
            "t w o",
            id="no such character",
        ),
    ],
)
def test_a_tokenizer_that_loses_content_is_refused(tmp_path: Path, tokenizer: Tokenizer, back: str) -> None:
    with pytest.raises(ValueError) as refused:
        TextCodec(write_model(tmp_path, tokenizer)).check_round_trip(["two", "two €"])
    assert str(refused.value).startswith(
        f"{tmp_path}/tokenizer.json: the tokenizer does not survive its round trip: 'two €' comes back as '{back}"
    )


@pytest.mark.parametrize("config", [{"vocab_size": 256}, {"text_config": {"vocab_size": 256}}])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, config: dict) -> None:
    model = write_model(tmp_path, byte_tokenizer(), config={"eos_token_id": 0, **config})
    with pytest.raises(ValueError, match="has token ids up to 256, and the model's vocab_size is 256; give the model"):
        TextCodec(model)


@pytest.mark.parametrize("token", [320, 99999, -1])
def test_a_stop_token_beyond_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    files = {"config": {"vocab_size": 320, "eos_token_id": 0}, "generation_config": {"eos_token_id": [319, token]}}
    with pytest.raises(ValueError, match=f"eos_token_id {token} is beyond the vocabulary of 320; name the token"):
        TextCodec(write_model(tmp_path, byte_tokenizer(), **files))


def test_a_broken_file_of_the_model_is_refused_by_its_name(tmp_path: Path) -> None:
    model = write_model(tmp_path, byte_tokenizer())
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json cannot be read: Input data was truncated; save"):
        TextCodec(model)


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

    def size(self, split: str) -> None:
        return None


class Bytes:
    def encode(self, text: str, special: bool = True) -> bytes:
        return text.encode()


def task() -> Task:
    data = {"reasoningGym": {"dataset": "chain_sum"}}
    return Task.model_validate({"name": "sums", "data": data, "prompt": "Q: {question}\n", "reward": "sums"})


async def test_a_group_shares_one_prompt_made_off_the_event_loop() -> None:
    source = CountingSource()
    prompt_cache = PromptCache({"sums": source}, PromptMaker({"sums": task()}, Bytes()), 600.0)
    prompts = await asyncio.gather(*(prompt_cache.prompt("sums", "train", 4) for _ in range(8)))
    prompt_cache.close()
    assert {prompt.text for prompt in prompts} == {"Q: 4?\n"}
    assert source.rows == [4]
    assert threading.current_thread().name not in source.threads


async def test_a_problem_that_cannot_be_made_fails_all_who_wait_and_is_tried_again_later() -> None:
    source = CountingSource()
    prompt_cache = PromptCache({"sums": source}, PromptMaker({"sums": task()}, Bytes()), 600.0)
    failed = await asyncio.gather(*(prompt_cache.prompt("sums", "train", 13) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in failed] == ["no such problem"] * 3
    with pytest.raises(RuntimeError):
        await prompt_cache.prompt("sums", "train", 13)
    prompt_cache.close()
    assert source.rows == [13, 13]


async def test_a_slow_source_does_not_delay_other_tasks() -> None:
    opened = threading.Event()

    class SlowSource(CountingSource):
        def problem(self, split: str, row: int) -> dict:
            assert opened.wait(60)
            return super().problem(split, row)

    tasks = {name: task() for name in ("slow", "quick")}
    prompt_cache = PromptCache({"slow": SlowSource(), "quick": CountingSource()}, PromptMaker(tasks, Bytes()), 600.0)
    slow = [asyncio.create_task(prompt_cache.prompt("slow", "train", row)) for row in range(3)]
    await asyncio.sleep(0)
    assert (await prompt_cache.prompt("quick", "train", 5)).text == "Q: 5?\n"
    assert not any(waiting.done() for waiting in slow)
    opened.set()
    assert [prompt.text for prompt in await asyncio.gather(*slow)] == ["Q: 0?\n", "Q: 1?\n", "Q: 2?\n"]
    prompt_cache.close()


async def test_a_source_that_gives_no_row_for_long_fails_those_who_wait() -> None:
    opened = threading.Event()

    class HungSource(CountingSource):
        def problem(self, split: str, row: int) -> dict:
            assert opened.wait(60)
            return super().problem(split, row)

    prompt_cache = PromptCache({"sums": HungSource()}, PromptMaker({"sums": task()}, Bytes()), 0.01)
    with pytest.raises(ValueError, match=r"the data of task sums gave no row for 0\.01 s, row 3 of split train is not"):
        await prompt_cache.prompt("sums", "train", 3)
    opened.set()
    assert (await prompt_cache._kept["sums", "train", 3]).text == "Q: 3?\n", "it is not made twice"
    prompt_cache.close()


async def test_cancelling_one_member_does_not_disturb_the_others() -> None:
    source = CountingSource()
    prompt_cache = PromptCache({"sums": source}, PromptMaker({"sums": task()}, Bytes()), 600.0)
    members = [asyncio.create_task(prompt_cache.prompt("sums", "train", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    members[0].cancel()
    kept = await asyncio.gather(*members[1:])
    prompt_cache.close()
    assert [prompt.text for prompt in kept] == ["Q: 1?\n"] * 2
