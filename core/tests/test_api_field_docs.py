"""Descriptions of fields are read from the source when they are asked for."""

from dataclasses import dataclass
from typing import ClassVar

from rljob.api.base import Model
from rljob.api.field_docs import documented_schema, field_docs


class Base(Model):
    first_field: int = 0
    """Of the base.

    Two paragraphs.
    """
    plain: int = 0


@dataclass
class Part:
    one: int = 0
    """A part's."""


class Derived(Base):
    own: Part | None = None
    """Of the class."""
    """Not of a field."""
    constant: ClassVar[int] = 1
    """Of a class variable."""
    without: int = 0


def test_fields_have_the_text_below_them():
    assert field_docs(Derived) == {
        "first_field": "Of the base.\n\nTwo paragraphs.",
        "own": "Of the class.",
        "constant": "Of a class variable.",
    }
    assert field_docs(Part) == {"one": "A part's."}


def test_a_schema_has_the_descriptions_by_alias():
    schema = documented_schema(Derived)
    described = {name: field.get("description") for name, field in schema["properties"].items()}
    assert described == {
        "firstField": "Of the base.\n\nTwo paragraphs.", "plain": None, "own": "Of the class.", "without": None
    }  # fmt: skip
    assert schema["$defs"]["Part"]["properties"]["one"]["description"] == "A part's."


def test_a_class_without_source_has_no_descriptions():
    made = type("Made", (Model,), {"__annotations__": {"field": int}, "__module__": "nowhere"})
    assert field_docs(made) == {}
