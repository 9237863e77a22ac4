"""Text that is safe to print."""

import json
import unicodedata

import pytest

from rljob.api.job_status import EvaluationResult
from rljob.api.text_escape import escape_block, escape_data, escape_json, escape_line

RANGES = (range(0x3100), range(0xD800, 0xE000), range(0xFE00, 0x10000), range(0xE0000, 0xE0200))
EVERYTHING = [chr(code) for codes in RANGES for code in codes]
"""Characters of all blocks with control or format characters."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J\x7f\x00", r"\x9b2J\x7f\x00"),
        ("a\rb\x85c", r"a\rb\x85c"),
        ("abc\u202edef\u2066", r"abc\u202edef\u2066"),
        ("a\u200bb\u2028c\ufeff", r"a\u200bb\u2028c\ufeff"),
        ("\udc80", r"\udc80"),
        ("\U000e0041", r"\U000e0041"),
        (r"\frac{1}{2} [bold]é漢🙂", r"\frac{1}{2} [bold]é漢🙂"),
    ],
)
def test_control_and_invisible_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert escape_line(text) == escape_block(text) == shown


def test_newlines_and_tabs_stay_in_a_block_only() -> None:
    assert escape_block("a\n\tb") == "a\n\tb"
    assert escape_line("a\n\tb") == r"a\n\tb"


@pytest.mark.parametrize("escape", [escape_line, escape_block])
def test_no_control_character_no_line_break_and_no_surrogate_is_left(escape: object) -> None:
    assert callable(escape)
    shown = escape("".join(EVERYTHING))
    left = {x for x in shown if unicodedata.category(x) in ("Cc", "Cs", "Zl", "Zp")}
    assert left == (set() if escape is escape_line else {"\n", "\t"})
    assert not {x for x in shown if unicodedata.bidirectional(x) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI")}
    assert shown.encode()


def test_all_texts_of_plain_data_are_escaped() -> None:
    result = EvaluationResult(0, "sums\x1b", 0.5, 2, 0.5, failure="a\n\x07")
    assert escape_data({"\x1b": [("\x00", 1), result]}) == {
        r"\x1b": [(r"\x00", 1), EvaluationResult(0, r"sums\x1b", 0.5, 2, 0.5, failure="a\n" + r"\x07")]
    }


def test_json_stays_the_same_value_and_has_no_control_character() -> None:
    value = {"text": EVERYTHING, "[/]": "\x1b\x9b\u202e\U000e0041"}
    shown = escape_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(shown) == value
    assert {x for x in shown if unicodedata.category(x) in ("Cc", "Cs", "Zl", "Zp")} == {"\n"}
