"""Errors of a manifest as sentences: path of the field, cause, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rljob.api.field_metadata import nested_model
from rljob.api.unsupported import near_miss, on_one_line

KEY = "[key]"
"""Path element that pydantic adds for an invalid key."""


class ManifestError(ValueError):
    """An invalid manifest.

    Args:
        problems: messages without a trailing period; duplicates are dropped.
        source: name of the file, or empty.
    """

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = list(dict.fromkeys(problems))
        self.source = source
        super().__init__("\n".join(f"{source}: {problem}" if source else problem for problem in self.problems))


def sentences(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one sentence for each problem in ``error``, a validation error of ``root``."""
    return [line for detail in error.errors(include_url=False) for line in sentences_of(detail, root)]


def path_text(location: Sequence[str | int]) -> str:
    """Return a location as text: spec.tasks[0].reward."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{on_one_line(part)}" if text else on_one_line(part)
    return text


def model_at(location: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model at ``location`` of ``root``, or None."""
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()} if model else {}
        model = nested_model(fields[part].annotation)[0] if part in fields else None
    return model


def sentences_of(detail: ErrorDetails, root: type[BaseModel]) -> list[str]:
    """Return the sentences of one problem in a validation error of ``root``."""
    path = path_text([part for part in detail["loc"] if part != KEY])
    if detail["type"] == "value_error":  # raised by our validators: lines of "field: cause"
        return [f"{path}.{line}" if path else line for line in str(detail["ctx"]["error"]).splitlines()]
    if detail["type"] == "extra_forbidden":
        return [f"{path}: {_unknown(detail['loc'], root)}"]
    if detail["type"] in ("literal_error", "extension") and (refusal := _not_yet(detail, root)):
        return [f"{path}: {refusal}"]
    wording = WORDING.get(detail["type"])
    if wording is None:
        message = detail["msg"]
        return [f"{path}: {message[0].lower()}{message[1:]}"]
    return [f"{path}: {wording(detail.get('ctx', {}), detail['input'])}{_instead_of_null(detail, root)}"]


def _instead_of_null(detail: ErrorDetails, root: type[BaseModel]) -> str:
    """Return the remedy for a null value; empty for other values."""
    if detail["input"] is not None:
        return ""
    model, name = model_at(detail["loc"][:-1], root), detail["loc"][-1]
    optional = any(
        name in (key, field.alias) and not field.is_required()
        for key, field in (model.model_fields.items() if model else ())
    )
    return "; leave it out for its default" if optional else "; give it a value"


def _not_yet(detail: ErrorDetails, root: type[BaseModel]) -> str | None:
    model = model_at(detail["loc"][:-1], root)
    defaults = {field.alias: field.default for field in model.model_fields.values()} if model else {}
    default = defaults.get(str(detail["loc"][-1]))
    return near_miss(detail["loc"], detail["input"], detail["ctx"]["expected"], default, root)


def _unknown(location: Sequence[str | int], root: type[BaseModel]) -> str:
    model = model_at(location[:-1], root)
    names = [field.alias or name for name, field in model.model_fields.items()] if model else []
    folded = {name.lower(): name for name in names}
    key = str(location[-1]).replace("_", "").replace("-", "").lower()
    close = difflib.get_close_matches(key, folded, n=1)
    if close:
        return f"unknown field; did you mean {folded[close[0]]}?"
    return f"unknown field; there are {_list(names, 'and')}" if names else "unknown field; remove it"


def _list(words: Sequence[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _bound(text: str) -> Callable[[dict[str, Any], Any], str]:
    return lambda ctx, value: f"must be {text.format(**ctx)}, not {_shown(value)}"


def _not_text(ctx: dict[str, Any], value: Any) -> str:
    quote = isinstance(value, int | float) and value is not None
    return f"must be text, not {_shown(value)}{'; put it in quotes' if quote else ''}"


def _pattern(ctx: dict[str, Any], value: Any) -> str:
    if "http" in ctx["pattern"]:
        return f"must begin with http:// or https:// and a host, not {_shown(value)}"
    if "kMGTPE" in ctx["pattern"]:
        return f"must be an amount such as 10Gi, not {_shown(value)}"
    if "NCCL" in ctx["pattern"]:
        return f"must begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_, not {_shown(value)}; set others in template"
    if "A-Za-z" in ctx["pattern"]:
        return f"must be a resource of nodes such as rdma/hca, not {_shown(value)}"
    if "/" in ctx["pattern"]:
        return f"must be a range of addresses such as 10.0.0.0/8, not {_shown(value)}"
    characters = "digits and underscores" if "_" in ctx["pattern"] else "digits and dashes, first a letter"
    return f"must consist of lower-case letters, {characters}, not {_shown(value)}"


WORDING: dict[str, Callable[[dict[str, Any], Any], str]] = {
    "missing": lambda ctx, value: "required; add it",
    "greater_than_equal": _bound("at least {ge:.10g}"),
    "greater_than": _bound("more than {gt:.10g}"),
    "less_than_equal": _bound("at most {le:.10g}"),
    "less_than": _bound("less than {lt:.10g}"),
    "literal_error": lambda ctx, value: f"must be {ctx['expected']}, not {_shown(value)}",
    "int_type": _bound("a whole number"),
    "int_from_float": _bound("a whole number"),
    "int_parsing_size": _bound("a whole number of a usual size"),
    "float_type": _bound("a number"),
    "bool_type": _bound("true or false"),
    "string_type": _not_text,
    "string_too_long": lambda ctx, value: f"must have at most {ctx['max_length']} characters, not {len(value)}",
    "string_too_short": lambda ctx, value: "is empty; give it a value",
    "string_pattern_mismatch": _pattern,
    "list_type": _bound("a list"),
    "tuple_type": _bound("a list"),
    "dict_type": _bound("a mapping"),
    "model_type": _bound("a mapping"),
    "model_attributes_type": _bound("a mapping"),
    "too_short": lambda ctx, value: f"must have at least {_entries(ctx['min_length'])}, not {ctx['actual_length']}",
    "too_long": lambda ctx, value: f"must have at most {_entries(ctx['max_length'])}, not {ctx['actual_length']}",
    "finite_number": _bound("a finite number"),
}
"""Error type of pydantic → function of context and value that returns the cause."""
