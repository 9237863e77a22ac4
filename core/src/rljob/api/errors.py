"""Error messages of an invalid manifest: path of the field, cause, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rljob.api.field_metadata import nested_model
from rljob.api.model_address import S3_FORM
from rljob.api.unsupported import near_miss, on_one_line
from rljob.api.yaml_loader import plain_kind

MAX_EXACT = 2**53
"""A float below this bound with a whole value is written as a whole number."""
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
    """Return one message for each problem in ``error``, a validation error of ``root``."""
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
    """Return the messages of one problem in a validation error of ``root``."""
    path = path_text([part for part in detail["loc"] if part != KEY])
    if detail["type"] == "value_error":  # raised by validators of the manifest: lines of "field: cause"
        return [f"{path}.{line}" if path else line for line in str(detail["ctx"]["error"]).splitlines()]
    if detail["type"] == "extra_forbidden":
        return [f"{path}: {_unknown(detail['loc'], root)}"]
    if detail["type"] in ("literal_error", "extension") and (refusal := _unsupported(detail, root)):
        return [f"{path}: {refusal}"]
    cause = CAUSES.get(detail["type"])
    if cause is None:
        message = detail["msg"]
        return [f"{path}: {message[0].lower()}{message[1:]}"]
    return [f"{path}: {cause(detail.get('ctx', {}), detail['input'])}{_remedy_of_null(detail, root)}"]


def _remedy_of_null(detail: ErrorDetails, root: type[BaseModel]) -> str:
    """Return the remedy for a null value; empty for other values."""
    if detail["input"] is not None:
        return ""
    model, name = model_at(detail["loc"][:-1], root), detail["loc"][-1]
    optional = any(
        name in (key, field.alias) and not field.is_required()
        for key, field in (model.model_fields.items() if model else ())
    )
    return "; leave it out for its default" if optional else "; give it a value"


def _unsupported(detail: ErrorDetails, root: type[BaseModel]) -> str | None:
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
    return f"unknown field; there are {_enumerate(names)}" if names else "unknown field; remove it"


def _enumerate(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _format_input(value: Any) -> str:
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


def _must_be(text: str, *kinds: str) -> Callable[[dict[str, Any], Any], str]:
    """Return a function that returns a cause. ``kinds``: of plain YAML scalars that are valid without quotes."""

    def cause(ctx: dict[str, Any], value: Any) -> str:
        quoted = isinstance(value, str) and plain_kind(value) in kinds
        return f"must be {text.format(**ctx)}, not {_format_input(value)}{'; remove the quotes' if quoted else ''}"

    return cause


def _compared(text: str, bound: str) -> Callable[[dict[str, Any], Any], str]:
    """Return a function that returns the cause of a number beyond the bound ``ctx[bound]``."""
    return lambda ctx, value: f"must be {text} {_number(ctx[bound])}, not {_number(value)}"


def _number(value: float) -> str:
    """Return a number as text, whole numbers with all digits."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if float(value).is_integer() and abs(value) < MAX_EXACT else repr(value)


def _not_text(ctx: dict[str, Any], value: Any) -> str:
    quote = isinstance(value, int | float) and value is not None
    return f"must be text, not {_format_input(value)}{'; put it in quotes' if quote else ''}"


def _pattern(ctx: dict[str, Any], value: Any) -> str:
    if "s3://" in ctx["pattern"]:
        return f"must be {S3_FORM}, not {_format_input(value)}"
    if "http" in ctx["pattern"]:
        return f"must begin with http:// or https:// and a host, not {_format_input(value)}"
    if "kMGTPE" in ctx["pattern"]:
        return f"must be an amount such as 10Gi, not {_format_input(value)}"
    if "NCCL" in ctx["pattern"]:
        shown = _format_input(value)
        return f"must begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_, not {shown}; set others in template"
    if "A-Za-z" in ctx["pattern"]:
        return f"must be a resource of nodes such as rdma/hca, not {_format_input(value)}"
    if "/" in ctx["pattern"]:
        return f"must be a range of addresses such as 10.0.0.0/8, not {_format_input(value)}"
    characters = "digits and underscores" if "_" in ctx["pattern"] else "digits and dashes, first a letter"
    return f"must consist of lower-case letters, {characters}, not {_format_input(value)}"


CAUSES: dict[str, Callable[[dict[str, Any], Any], str]] = {
    "missing": lambda ctx, value: "required; add it",
    "greater_than_equal": _compared("at least", "ge"),
    "greater_than": _compared("more than", "gt"),
    "less_than_equal": _compared("at most", "le"),
    "less_than": _compared("less than", "lt"),
    "literal_error": lambda ctx, value: f"must be {ctx['expected']}, not {_format_input(value)}",
    "int_type": _must_be("a whole number", "int"),
    "int_from_float": _must_be("a whole number"),
    "int_parsing_size": _must_be("a whole number with fewer digits"),
    "float_type": _must_be("a number", "int", "float"),
    "bool_type": _must_be("true or false", "bool"),
    "string_type": _not_text,
    "string_too_long": lambda ctx, value: f"must have at most {ctx['max_length']} characters, not {len(value)}",
    "string_too_short": lambda ctx, value: "is empty; give it a value",
    "string_pattern_mismatch": _pattern,
    "list_type": _must_be("a list"),
    "tuple_type": _must_be("a list"),
    "dict_type": _must_be("a mapping"),
    "model_type": _must_be("a mapping"),
    "model_attributes_type": _must_be("a mapping"),
    "too_short": lambda ctx, value: f"must have at least {_entries(ctx['min_length'])}, not {ctx['actual_length']}",
    "too_long": lambda ctx, value: f"must have at most {_entries(ctx['max_length'])}, not {ctx['actual_length']}",
    "finite_number": _must_be("a finite number"),
}
"""Error type of pydantic → function (context, value) that returns the cause."""
