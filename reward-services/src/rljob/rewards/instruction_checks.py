"""Checks of the instructions of IFEval (Zhou et al., arXiv 2311.07911), one function for each type.

Each function gets a completion that is not empty and the arguments of the type. Differences from the original: keywords
are literal text and not regular expressions, a constrained response has exactly one of the options, sentences are split
by a rule, a text without letters is in no language, and a bullet has text and is no negative number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

import py3langid

from rljob.api.rewards.kinds.instructions import LANGUAGES
from rljob.rewards.answer_text import json_document

WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w+(?:['’-]\w+)*")
SENTENCE_END = re.compile(r"(?<!\b[A-Z])[.!?]+[\"'”’)\]*_]*(?=\s|$)|[。！？]+|\n\s*\n")
ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|e\.g|i\.e|cf|Fig|Vol|approx)\.(?=\s)", re.I)
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compare(count: int, relation: str, number: float) -> bool:
    """Return whether ``count`` is "less than" or "at least" ``number``."""
    return count < number if relation == "less than" else count >= number


def sentences(text: str) -> int:
    """Return the number of sentences: parts with a letter or digit, ended by . ! ? before white space, or 。！？."""
    text = ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    return sum(WORD.search(part) is not None for part in SENTENCE_END.split(text))


@functools.cache
def _identify() -> Callable[[str], tuple[str, float]]:
    py3langid.set_languages(sorted(LANGUAGES))
    identify: Callable[[str], tuple[str, float]] = py3langid.classify
    return identify


def is_language(text: str, language: str) -> bool:
    """Return whether ``text`` is most likely in ``language``, a code of LANGUAGES."""
    return any(map(str.isalpha, text)) and _identify()(text)[0] == language


def keyword_count(text: str, keyword: str) -> int:
    """Return the number of occurrences of ``keyword``, also within words, ignoring case."""
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def _split(text: str, mark: str) -> list[str] | None:
    """Return the parts of ``text`` between marks, without empty ones at the ends; None if another one is empty."""
    parts = [part.strip() for part in re.split(mark, text)]
    inner = parts[1:-1] if len(parts) > 1 else []
    return None if "" in inner else [part for part in parts if part]


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = _split(text, r"\s?\*\*\*\s?")
    return parts is not None and len(parts) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = re.split(r"[.,?!'\"]", parts[int(nth_paragraph) - 1].split()[0].lstrip("'\""))[0]
    return word.lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [letter for letter in postscript_marker if letter.isalpha()]
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = spaced.get(postscript_marker, re.escape(postscript_marker))
    return bool(letters) and re.search(rf"^[^\S\n]*{marker}.*$", text, re.IGNORECASE | re.MULTILINE) is not None


def _highlights(text: str, num_highlights: int) -> bool:
    rest, count = text, 0
    for pattern in (r"\*\*([^\n*]+)\*\*", r"\*([^\n*]+)\*"):
        count += sum(bool(inside.strip()) for inside in re.findall(pattern, rest))
        rest = re.sub(pattern, " ", rest)
    return count >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _json(text: str) -> bool:
    fence = re.fullmatch(r"\s*```(?:json)?\s*\n?(.*?)```\s*", text, re.DOTALL | re.IGNORECASE)
    try:
        json_document(fence[1] if fence else text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = _split(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _ends(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capitals(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return compare(sum(word.isupper() for word in TOKEN.findall(text)), capital_relation, capital_frequency)


CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(keyword_count(text, keyword) for keyword in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        keyword_count(text, keyword), relation, frequency
    ),
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": is_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        sentences(text), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        len(WORD.findall(text)), relation, num_words
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-(?![-\d]))[-* \t]*[^-*\s].*$", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: sum(option in text for option in OPTIONS) == 1,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text: any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": _ends,
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda text: text.isupper() and is_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and is_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Type → check. The names of the arguments are those of IFEval."""
