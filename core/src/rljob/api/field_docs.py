"""Descriptions of fields: the string literals below them in the source.

pydantic can read them too, but does it for every class at import, which takes a third of the time of the import.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return field → description of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__annotations__" in vars(base) and base.__module__.partition(".")[0] != "pydantic":
            docs |= _own_docs(base)
    return docs


def documented_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model by alias, with the descriptions of all fields."""
    return model.model_json_schema(by_alias=True, schema_generator=_Documented)


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # the class was not written in a file
        return {}
    [definition] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


class _Documented(GenerateJsonSchema):
    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """See pydantic. Adds the descriptions of a model's fields."""
        cls: type[BaseModel] = schema["cls"]
        names = {name: field.alias or name for name, field in cls.model_fields.items()}
        return _described(super().model_schema(schema), field_docs(cls), names)

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """See pydantic. Adds the descriptions of a dataclass's fields, whose aliases are camelCase."""
        names = {field.name: to_camel(field.name) for field in dataclasses.fields(schema["cls"])}
        return _described(super().dataclass_schema(schema), field_docs(schema["cls"]), names)


def _described(schema: JsonSchemaValue, docs: dict[str, str], names: dict[str, str]) -> JsonSchemaValue:
    for field in names.keys() & docs.keys():  # a class variable may have a description too
        schema["properties"][names[field]].setdefault("description", docs[field])
    return schema
