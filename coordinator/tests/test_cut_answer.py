"""The text of an answer that a stop string ended."""

from array import array

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from rljob.api.tasks import Sampling
from rljob.runner.cut_answer import answer_text

WORDS = ["a", "bc", "c", "cd", "â", "Ĥ", "¬"]  # the last three are the bytes of one character


class Words:
    def __init__(self) -> None:
        self.tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
        self.tokenizer.decoder = ByteLevel()

    def decode(self, token_ids: bytes) -> str:
        return self.tokenizer.decode(array("i", token_ids).tolist())


@pytest.mark.parametrize(
    ("tokens", "stop", "finish", "cut", "included"),
    [
        ([0, 1], ["b"], "stop", "a", "ab"),  # the last token has text after the stop string
        ([0, 1], ["x"], "stop", "abc", "abc"),  # a stop token ended it
        ([0, 1], ["b"], "length", "abc", "abc"),
        ([1, 0, 2], ["c"], "stop", "bca", "bcac"),  # the first c is one of the first minTokens tokens
        ([0, 0, 2], ["aac", "ac"], "stop", "", "aac"),  # of equal ends the first counts
        ([0, 0, 2], ["ac", "aac"], "stop", "a", "aac"),
        ([2, 3], ["cd", "cc"], "stop", "", "cc"),  # the one that ends first
        ([0, 4, 5, 6], ["€"], "stop", "a", "a€"),
        ([], ["a"], "stop", "", ""),
    ],
)
def test_the_text_is_cut_at_the_stop_string(tokens, stop, finish, cut, included):
    for include, text in ((False, cut), (True, included)):
        sampling = Sampling(stop=stop, include_stop=include)
        assert answer_text(Words(), sampling, array("i", tokens).tobytes(), finish) == text
