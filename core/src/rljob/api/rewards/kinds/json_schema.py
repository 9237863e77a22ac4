"""The built-in reward ``json_schema``: options and row check. Its scorer is in :mod:`rljob.rewards`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from rljob.api.base import Model, Text
from rljob.api.rewards.kind import RewardKind, Row
from rljob.api.templates import kind_of, value_of


class JsonSchemaOptions(Model):
    """Options of `json_schema`."""

    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    """JSON schema (draft 7) for all rows; or give column"""
    column: Text | None = None
    """column with a schema for each row, as a mapping or as JSON text"""
    equals: Text | None = None
    """column with the correct document, as a value or as JSON text; null: every document that fits the schema"""
    answer: Literal["tag", "text"] = "text"
    """where the document is: between the last <answer> and </answer>, or the whole completion, a code fence excepted"""

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaOptions:
        if (self.json_schema is None) == (self.column is None):
            raise ValueError("needs exactly one of schema and column; give one of them")
        return self


def row_schema(row: Row, options: JsonSchemaOptions) -> dict[str, Any]:
    """Return the schema for a row.

    Raises:
        ValueError: the row lacks the column, or the column contains no schema.
    """
    if options.column is None:
        assert options.json_schema is not None, "the options have one of both"
        return options.json_schema
    schema = row_document(row, options.column)
    if not isinstance(schema, dict):
        raise ValueError(f"column {options.column!r} holds {kind_of(schema)}; it must hold a JSON schema")
    return schema


def row_document(row: Row, column: str) -> Any:
    """Return a document in a column: JSON text, or a mapping or a list as it is.

    Raises:
        ValueError: the row lacks the column, or the column contains text that is no JSON.
    """
    value = value_of(row, column)
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"column {column!r} holds no JSON ({error}); correct it") from None


def check_row(row: Row, options: JsonSchemaOptions) -> None:
    """Check that the row has the documents that the options name. The reward service compiles schemas.

    Raises:
        ValueError: it lacks one.
    """
    row_schema(row, options)
    if options.equals is not None:
        row_document(row, options.equals)


NAME = "json_schema"
KIND = RewardKind(
    make="rljob.rewards.json_schema_reward:JsonSchemaReward",
    options=JsonSchemaOptions,
    row_check=check_row,
    summary="1 when the completion is JSON that fits a schema, else 0.",
)
