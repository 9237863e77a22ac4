"""The built-in reward ``instructions``: options, types of instructions and row check.

The types, their names and arguments are those of IFEval (Zhou et al., arXiv 2311.07911). Their checks are in
:mod:`rljob.rewards.instruction_checks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import RewardKind, Row
from rljob.api.templates import kind_of, value_of

RELATIONS = ("less than", "at least")
_CODES = (
    "ar bg bn cs da de el en es fa fi fr gu he hi hu id it ja kn ko ml mr ne nl no pa pl pt ro ru sv sw ta te th tr uk"
)
LANGUAGES = frozenset((_CODES + " ur vi zh").split())
"""Codes of `language:response_language`."""
_LIST, _TEXT, _COUNT, _RELATION, _LANGUAGE = "a list of texts", "text", "a number", " or ".join(RELATIONS), "a code"
INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "keywords:existence": {"keywords": _LIST},
    "keywords:frequency": {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION},
    "keywords:forbidden_words": {"forbidden_words": _LIST},
    "keywords:letter_frequency": {"letter": _TEXT, "let_frequency": _COUNT, "let_relation": _RELATION},
    "language:response_language": {"language": _LANGUAGE},
    "length_constraints:number_sentences": {"num_sentences": _COUNT, "relation": _RELATION},
    "length_constraints:number_words": {"num_words": _COUNT, "relation": _RELATION},
    "length_constraints:number_paragraphs": {"num_paragraphs": _COUNT},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": _COUNT,
        "nth_paragraph": _COUNT,
        "first_word": _TEXT,
    },
    "detectable_content:number_placeholders": {"num_placeholders": _COUNT},
    "detectable_content:postscript": {"postscript_marker": _TEXT},
    "detectable_format:number_bullet_lists": {"num_bullets": _COUNT},
    "detectable_format:constrained_response": {},
    "detectable_format:number_highlighted_sections": {"num_highlights": _COUNT},
    "detectable_format:multiple_sections": {"section_spliter": _TEXT, "num_sections": _COUNT},
    "detectable_format:json_format": {},
    "detectable_format:title": {},
    "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": _TEXT},
    "startend:end_checker": {"end_phrase": _TEXT},
    "startend:quotation": {},
    "change_case:capital_word_frequency": {"capital_frequency": _COUNT, "capital_relation": _RELATION},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "punctuation:no_comma": {},
}
"""Type → argument → what it holds."""


class InstructionsOptions(Model):
    """Options of `instructions`."""

    ids: Text = "instruction_id_list"
    """column with the list of instruction types"""
    arguments: Text = "kwargs"
    """column with the list of their arguments, one mapping for each type; or JSON text. Null values are ignored"""
    mode: Literal["strict", "loose"] = "strict"
    """`loose` also accepts the completion without its first line, last line, or asterisks"""
    credit: Literal["all", "share"] = "all"
    """`all`: 1 if all instructions are followed; `share`: the share of followed instructions"""


def instructions_of(row: Row, options: InstructionsOptions) -> list[tuple[str, dict[str, Any]]]:
    """Return (type, arguments) of the row's instructions.

    Raises:
        ValueError: the row lacks a column, or a column contains something else.
    """
    ids, arguments = (_list(row, column) for column in (options.ids, options.arguments))
    if not ids or len(ids) != len(arguments):
        raise ValueError(
            f"columns {options.ids!r} and {options.arguments!r} hold {len(ids)} and {len(arguments)} entries; give at "
            "least one type, and one mapping of arguments for each"
        )
    found = []
    for i, (name, given) in enumerate(zip(ids, arguments, strict=True)):
        if name not in INSTRUCTIONS:
            raise ValueError(f"column {options.ids!r} names {name!r}, which is not one of {', '.join(INSTRUCTIONS)}")
        values = {key: value for key, value in (given or {}).items() if value is not None}
        for argument, what in INSTRUCTIONS[name].items():
            if not _holds(values.get(argument), what):
                raise ValueError(
                    f"column {options.arguments!r}, entry {i}: {name} needs {argument} ({what}), which is "
                    f"{values.get(argument)!r}; correct the row"
                )
        found.append((name, {argument: values[argument] for argument in INSTRUCTIONS[name]}))
    return found


def _list(row: Row, column: str) -> list[Any]:
    value = value_of(row, column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column {column!r} holds no JSON ({error}); correct it") from None
    if not isinstance(value, list):
        raise ValueError(f"column {column!r} holds {kind_of(value)}; it must hold a list")
    return value


def _holds(value: Any, what: str) -> bool:
    match what:
        case "a list of texts":
            return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)
        case "text":
            return isinstance(value, str) and bool(value.strip())
        case "a number":
            return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) >= 0
        case "a code":
            return value in LANGUAGES
        case _:
            return value in RELATIONS


def check_row(row: Row, options: InstructionsOptions) -> None:
    """Check that the row has instructions of known types with their arguments.

    Raises:
        ValueError: it has others.
    """
    instructions_of(row, options)


NAME = "instructions"
KIND = RewardKind(
    make="rljob.rewards.instructions_reward:InstructionsReward",
    options=InstructionsOptions,
    row_check=check_row,
    summary="1 when the completion follows all instructions of the row, of the 25 types of IFEval, else 0.",
)
