"""Options, row checks and edge cases of the built-in rewards; docs/rewards.md has the examples of their scores."""

from __future__ import annotations

import pytest

from rljob.api.extensions import load
from rljob.api.rewards import REWARDS
from rljob.api.rewards.kinds.instructions import INSTRUCTIONS
from rljob.api.tasks import Task
from rljob.protocol.score_messages import ScoreItem
from rljob.rewards.answer_text import ascii_digits, last_box, latex_symbols
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.instruction_checks import CHECKS, sentences
from rljob.rewards.math_reward import LONGEST_TEXT
from rljob.rewards.pool import Pool

TASK = Task.model_validate({"name": "sums", "data": {"jsonl": {"path": "a"}}, "reward": "r"})


def evaluator(name: str, config: dict | None = None, tasks: tuple[Task, ...] = (TASK,)) -> RewardEvaluator:
    kind = REWARDS[name]
    assert isinstance(kind.make, str)
    return RewardEvaluator(load({}, kind.make, name)(kind.parse(config or {}), tasks), name)


def item(completion: str, row: dict, sample: str = "s") -> ScoreItem:
    return ScoreItem(sample, "sums", "", completion, "stop", row)


# --- options and rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("math", {"answer": "box"}, "config.answer: must be 'boxed', 'tag' or 'text', not 'box'"),
        ("multiple_choice", {"choices": 27}, "config.choices: must be at most 26, not 27"),
        ("regex", {}, "config: needs exactly one of pattern and column; give one of them"),
        ("regex", {"pattern": "a", "column": "b"}, "config: needs exactly one of pattern and column; give one"),
        ("json_schema", {}, "config: needs exactly one of schema and column; give one of them"),
        ("format", {"tags": ["a", "a"]}, "config.tags: 'a' is named twice; name it once"),
        ("length", {}, "config: bounds nothing; give min or max"),
        ("length", {"min": 2, "max": 1}, "config: max 1 is less than min 2; raise it or lower the other"),
        ("overlong", {}, "config.buffer: required; add it"),
        ("overlong", {"buffer": 3, "maxTokens": 2}, "config: buffer 3 is more than maxTokens 2; lower it"),
        ("combined", {"parts": [{"name": "a", "builtin": "maths"}]}, "config.parts[0].builtin: 'maths' is not one of"),
        ("combined", {"parts": [{"name": "a", "builtin": "combined"}]}, "config.parts[0].builtin: 'combined' is not"),
        (
            "combined",
            {"parts": [{"name": "a", "builtin": "math", "config": {"colum": "b"}}]},
            "config.parts[0].config.colum: unknown field; did you mean column?",
        ),
        (
            "combined",
            {"parts": [{"name": "a", "builtin": "math"}, {"name": "a", "builtin": "math"}]},
            "config.parts[1].name: 'a' is used twice; give every part its own name",
        ),
    ],
)
def test_a_wrong_option_is_a_sentence_with_its_field(name: str, config: dict, problem: str) -> None:
    (found,) = REWARDS[name].option_problems(config)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("name", "config", "row", "problem"),
    [
        ("math", {}, {"answer": " "}, "column 'answer' is empty; it must hold the correct answer"),
        ("math", {}, {"question": "?"}, "there is no column 'answer'; there are question"),
        ("multiple_choice", {}, {"answer": 4}, "column 'answer' holds 4; it must hold a letter from A to D, or a num"),
        ("multiple_choice", {}, {"answer": True}, "column 'answer' holds a bool; it must hold a letter from A to D"),
        ("multiple_choice", {}, {"answer": "E"}, "column 'answer' holds 'E'; it must hold a letter from A to D"),
        ("regex", {"column": "form"}, {"form": "("}, r"column 'form' holds no regular expression \(missing"),
        ("regex", {"column": "form"}, {"form": "a{99999999999}"}, r"no regular expression \(the repetition number is"),
        ("json_schema", {"column": "form"}, {"form": "{"}, "column 'form' holds no JSON"),
        ("json_schema", {"column": "form"}, {"form": "[]"}, "column 'form' holds a list; it must hold a JSON schema"),
        ("json_schema", {"schema": {}, "equals": "a"}, {"b": 1}, "there is no column 'a'"),
        ("instructions", {}, {"instruction_id_list": [], "kwargs": []}, "hold 0 and 0 entries; give at least one"),
        ("instructions", {}, {"instruction_id_list": ["a"], "kwargs": [{}]}, "names 'a', which is not one of keywords"),
        ("combined", {"parts": [{"name": "a", "builtin": "math"}]}, {"b": 1}, "there is no column 'answer'"),
    ],
)
def test_a_row_that_cannot_be_scored_is_found_before_the_run(name: str, config: dict, row: dict, problem: str) -> None:
    kind = REWARDS[name]
    assert callable(kind.row_check)
    with pytest.raises(ValueError, match=problem):
        kind.row_check(row, kind.parse(config))


def test_a_schema_of_the_options_is_compiled_when_the_reward_is_made() -> None:
    with pytest.raises(ValueError, match=r"schema.properties.a.\$ref refers to another document, 'http://a'; copy it"):
        evaluator("json_schema", {"schema": {"properties": {"a": {"$ref": "http://a"}}}})


def test_a_buffer_longer_than_an_answer_of_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer 300 is more than the 256 tokens of an answer of task sums; lower it"):
        evaluator("overlong", {"buffer": 300})


def test_a_part_that_does_not_score_the_data_of_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match="part gym is the builtin reasoning_gym, which scores reasoningGym data only"):
        evaluator("combined", {"parts": [{"name": "gym", "builtin": "reasoning_gym"}]})


# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed 4", "4"),
        (r"\boxed{5", None),
        (r"\boxedtext{6}", None),
        ("7", None),
        (r"\boxed", None),
    ],
)
def test_the_last_box_is_found(text: str, content: str | None) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("text", "ascii"),
    [("−1", "-1"), ("1½", "3/2"), ("⅔", "2/3"), ("x⁻²", "x^{-2}"), ("a₁₂", "a_{12}"), ("３٫٥", "3.5"), ("५", "5")],
)
def test_characters_of_unicode_have_ascii_forms(text: str, ascii: str) -> None:
    assert ascii_digits(text) == ascii


def test_mathematical_characters_become_commands() -> None:
    assert latex_symbols("√(x+1)×π≤∞") == r"\sqrt{x+1}\times \pi \le \infty "


@pytest.mark.parametrize("copied", [r"2 + 2", r"2+2", r"$2 + 2$", r"\left(2+2\right)"])
def test_an_answer_copied_from_the_prompt_does_not_count(copied: str) -> None:
    evaluate = evaluator("math")
    sample = item(rf"\boxed{{{copied}}}", {"answer": "4"})
    sample.prompt = "What is $2 + 2$? Or (2+2)?"
    assert evaluate(sample).reward == 0.0


@pytest.mark.parametrize("prompt", ["Is it -3 or 3?", "Is 2/3 more than 1/2? Or 12/3?"])
def test_an_answer_that_the_prompt_offers_counts(prompt: str) -> None:
    evaluate = evaluator("math")
    for answer in ("-3", "2/3"):
        sample = item(rf"\boxed{{{answer}}}", {"answer": answer})
        sample.prompt = prompt
        assert evaluate(sample).reward == 1.0


@pytest.mark.parametrize("answer", ["1e-07", "$1E-7$", "x = 1.0e-7", r"1 \times 10^{-7}", "0.0000001"])
@pytest.mark.parametrize(("row", "reward"), [(1e-07, 1.0), (2e-07, 0.0), (-1e-07, 0.0), (1e22, 0.0)])
def test_an_exponent_in_a_number_of_json_is_not_eulers_e(answer: str, row: float, reward: float) -> None:
    evaluate = evaluator("math")
    assert evaluate(item(rf"\boxed{{{answer}}}", {"answer": row})).reward == reward


@pytest.mark.parametrize("text", ["It is 1e-07.", "It is 1E-7 m", "so $x = 1e-7$", "1.0e-7"])
def test_an_exponent_in_prose_is_read(text: str) -> None:
    evaluate = evaluator("math", {"answer": "text"})
    assert evaluate(item(text, {"answer": 1e-07})).reward == 1.0
    assert evaluate(item(text, {"answer": 1e-06})).reward == 0.0


def test_an_e_in_a_text_is_eulers() -> None:
    evaluate = evaluator("math")
    for answer, reward in {"2e-7": 1.0, "2e - 7": 1.0, r"2 \times 10^{-7}": 0.0, "2e^{-7}": 0.0}.items():
        assert evaluate(item(rf"\boxed{{{answer}}}", {"answer": "2e - 7"})).reward == reward


def test_the_end_of_a_long_completion_is_read() -> None:
    evaluate = evaluator("math")
    assert evaluate(item("x " * LONGEST_TEXT + r"\boxed{7}", {"answer": "7"})).reward == 1.0
    assert evaluate(item(r"\boxed{7}" + "x " * LONGEST_TEXT, {"answer": "7"})).reward == 0.0


async def test_an_answer_that_takes_too_long_or_too_much_memory_affects_no_other_sample() -> None:
    answers = [r"\boxed{99999999!}", r"\boxed{(9!)!)!}", r"\boxed{9^{9^{9^9}}}", r"\boxed{2}"]
    evaluate = evaluator("math")
    async with Pool(evaluate, "math", processes=1, timeout_seconds=1.5, memory_bytes=1 << 28) as pool:
        scores = await pool.score([item(answer, {"answer": "2"}, f"s{i}") for i, answer in enumerate(answers)])
    assert [score.reward for score in scores] == [0.0, 0.0, 0.0, 1.0]
    assert all(score.error in ("", "reward math took longer than 1.5 s") for score in scores)


# --- multiple choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answered"),
    [
        ("(c)", True),
        ("C.", True),
        ("**C**", True),
        (r"\boxed{\textbf{(C)}}", True),
        ("<answer> C </answer>", True),
        ("The correct option is C because of B.", True),
        ("Answer:\nC", True),
        ("The answer is $C$.", True),
        ("The answer is C, and I am sure.", True),
        ("The answer is Clear.", False),
        ("The answer is C and D.", False),
        ("C or D", False),
        ("(A) one (C) two", False),
        ("", False),
        ("I think so", False),
    ],
)
def test_a_choice_is_read_and_several_are_none(completion: str, answered: bool) -> None:
    score = evaluator("multiple_choice")(item(completion, {"answer": "C"}))
    assert (score.reward, score.metrics["answered"]) == (float(answered), float(answered))


# --- instructions -----------------------------------------------------------------------------------------------------

EN = "this is an answer in english"
CASES: dict[str, list[tuple[dict, str, bool]]] = {
    "keywords:existence": [({"keywords": ["Sun", "moon"]}, "sunny Moon", True), ({"keywords": ["sun"]}, "moon", False)],
    "keywords:frequency": [
        ({"keyword": "a", "frequency": 2, "relation": "at least"}, "A man", True),
        ({"keyword": "a", "frequency": 2, "relation": "less than"}, "A man", False),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["cat"]}, "category", True),
        ({"forbidden_words": ["cat"]}, "A Cat.", False),
    ],
    "keywords:letter_frequency": [
        ({"letter": "L", "let_frequency": 2, "let_relation": "at least"}, "Lol", True),
        ({"letter": "#", "let_frequency": 1, "let_relation": "at least"}, "Lol", False),
    ],
    "language:response_language": [
        ({"language": "hi"}, "यह हिन्दी में एक उत्तर है जो लंबा है", True),
        ({"language": "en"}, "Das ist leider kein englischer Satz.", False),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, "One. Two!", True),
        ({"num_sentences": 2, "relation": "less than"}, "One. Two!", False),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "less than"}, "one two", True),
        ({"num_words": 3, "relation": "at least"}, "one two", False),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "***\none\n***\ntwo\n***", True),
        ({"num_paragraphs": 2}, "one\n***\n***\ntwo", False),
    ],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "First.\n\n'Then, it", True),
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "First.\n\nIt then", False),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, "[name] at [place]", True),
        ({"num_placeholders": 2}, "[name] []", False),
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye\nP. S. more", True),
        ({"postscript_marker": "P.P.S"}, "Bye\nP.S. more", False),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, "* one\n- two", True),
        ({"num_bullets": 2}, "* one\n**bold**", False),
        ({"num_bullets": 1}, "-5 degrees\n- -\n---\n* **Bold** text", True),
        ({"num_bullets": 2}, "- \U0001f600\n- ...", True),
    ],
    "detectable_format:constrained_response": [({}, "My answer is maybe.", True), ({}, "maybe", False)],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", True),
        ({"num_highlights": 2}, "**one** * *", False),
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na\nSECTION 2\nb", True),
        ({"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na", False),
    ],
    "detectable_format:json_format": [
        ({}, "```json\n{}\n```", True),
        ({}, "so: {}", False),
        ({}, "NaN", False),
        ({}, "[1e999]", False),
    ],
    "detectable_format:title": [({}, "<<Rain>>\ntext", True), ({}, "<< >>", False)],
    "combination:two_responses": [({}, "one\n******\ntwo", True), ({}, "one******one", False)],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "Say it."}, "say it. Yes", True),
        ({"prompt_to_repeat": "Say it."}, "Yes", False),
    ],
    "startend:end_checker": [
        ({"end_phrase": "The end."}, 'It is "the end."', True),
        ({"end_phrase": "End"}, "no", False),
    ],
    "startend:quotation": [({}, ' "yes" ', True), ({}, '"', False)],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "NOW OR never", True),
        ({"capital_frequency": 2, "capital_relation": "less than"}, "NOW OR never", False),
    ],
    "change_case:english_capital": [({}, EN.upper(), True), ({}, EN, False)],
    "change_case:english_lowercase": [({}, EN, True), ({}, EN.title(), False)],
    "punctuation:no_comma": [({}, "one two", True), ({}, "one, two", False)],
}


def test_every_type_of_instruction_has_a_check_and_cases() -> None:
    assert list(CHECKS) == list(INSTRUCTIONS) == list(CASES) and len(CHECKS) == 25


@pytest.mark.parametrize(
    ("name", "arguments", "completion", "followed"),
    [pytest.param(name, *case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_an_instruction_is_checked(name: str, arguments: dict, completion: str, followed: bool) -> None:
    row = {"instruction_id_list": [name], "kwargs": [arguments | {"unused": None}]}
    score = evaluator("instructions")(item(completion, row))
    assert (score.error, score.reward) == ("", float(followed))
    empty = evaluator("instructions", {"mode": "loose"})(item(" \n", row))
    assert (empty.error, empty.reward) == ("", 0.0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Dr. Who paid 3.50. Why?", 2),
        ("One... two", 2),
        ("你好。世界！", 2),
        ("no end", 1),
        ("U.S. law", 1),
        ("...", 0),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert sentences(text) == count
