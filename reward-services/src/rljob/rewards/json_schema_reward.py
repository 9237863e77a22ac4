"""Scorer of the reward ``json_schema``: 1 if the completion is a JSON document that fits the schema, else 0."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import fastjsonschema
from fastjsonschema.draft07 import CodeGeneratorDraft07

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.json_schema import JsonSchemaOptions, row_document, row_schema
from rljob.api.tasks import Task
from rljob.rewards.answer_text import json_document, last_tag

FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
SUBSCHEMAS = re.compile(r"additional(Items|Properties)|contains|else|if|items|not|propertyNames|then")
SUBSCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "items"))
SUBSCHEMA_MAPS = frozenset(["$defs", "definitions", "dependencies", "patternProperties", "properties"])
RULES = re.compile(
    r"(min|max)(imum|Items|Length|Properties)|exclusiveM(in|ax)imum|const|enum|format|multipleOf|pattern|required|type"
    r"|uniqueItems|\$ref"
)
NOTES = re.compile(
    r"title|description|default|examples?|deprecated|readOnly|writeOnly|content(Encoding|MediaType)|\$(schema|id|comment)"
    r"|x-.*"
)
"""Keywords that demand nothing. The validator ignores all others, so a misspelt one would accept everything."""
FORMATS = {"uuid": r"^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\Z"}
"""Formats beside those of the validator."""
ALL_FORMATS = frozenset([*CodeGeneratorDraft07.FORMAT_REGEXS, *FORMATS, "regex"])


@deterministic
class JsonSchemaReward:
    """Validates by fastjsonschema. The metric ``answered`` is 1 if the completion is JSON.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.

    Raises:
        ValueError: the schema of the options is none.
    """

    def __init__(self, options: JsonSchemaOptions, tasks: Sequence[Task]) -> None:
        self._options = options
        if options.json_schema is not None:
            _validator(json.dumps(options.json_schema))

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the row has no schema, or no correct document.
        """
        validate = _validator(json.dumps(row_schema(problem, self._options)))
        expected = row_document(problem, self._options.equals) if self._options.equals is not None else None
        try:
            document = json_document(self._text(completion))
        except (ValueError, RecursionError):
            return 0.0, {"answered": 0.0}
        try:
            validate(document)
        except (fastjsonschema.JsonSchemaValueException, RecursionError):
            return 0.0, {"answered": 1.0}
        right = self._options.equals is None or _canonical(document) == _canonical(expected)
        return float(right), {"answered": 1.0}

    def _text(self, completion: str) -> str:
        text = last_tag(completion) or "" if self._options.answer == "tag" else completion
        fenced = FENCE.fullmatch(text)
        return fenced[1] if fenced else text


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Callable[[Any], Any]:
    """Return the function that raises an exception for a document that does not fit ``schema``.

    Raises:
        ValueError: the text is no schema of draft 7.
    """
    parsed = json.loads(schema)
    _check_keywords(parsed, "schema")
    if isinstance(parsed, dict):
        parsed["$schema"] = "http://json-schema.org/draft-07/schema"
    try:
        validate: Callable[[Any], Any] = fastjsonschema.compile(parsed, formats=FORMATS, use_default=False)
    except (
        fastjsonschema.JsonSchemaDefinitionException,
        TypeError,
        AttributeError,
        re.error,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError(f"the schema cannot be used ({error}); correct it") from None
    return validate


def _check_keywords(schema: Any, path: str) -> None:
    """Check that the validator ignores no rule of a schema.

    Raises:
        ValueError: it has an unknown keyword or format, or refers to another document.
    """
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        where = f"{path}.{key}"
        known = (
            key in SUBSCHEMA_MAPS
            or key in SUBSCHEMA_LISTS
            or any(form.fullmatch(key) for form in (SUBSCHEMAS, RULES, NOTES))
        )
        if not known:
            raise ValueError(f"{where} is not a keyword of JSON schema draft 7; correct or remove it")
        if key == "format" and (not isinstance(value, str) or value not in ALL_FORMATS):
            raise ValueError(f"{where} {value!r} is not checked; there are {', '.join(sorted(ALL_FORMATS))}")
        if key == "$ref" and not str(value).startswith("#"):
            raise ValueError(f"{where} refers to another document, {value!r}; copy it into $defs")
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            for name, part in value.items():
                _check_keywords(part, f"{where}.{name}")
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                _check_keywords(part, f"{where}[{i}]")
        elif SUBSCHEMAS.fullmatch(key):
            _check_keywords(value, where)


def _canonical(document: Any) -> str:
    """Return a text that is equal for equal documents: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(document, float) and document.is_integer():
        document = int(document)
    if isinstance(document, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_canonical(document[key])}" for key in sorted(document)) + "}"
    if isinstance(document, list):
        return "[" + ",".join(map(_canonical, document)) + "]"
    return json.dumps(document)
