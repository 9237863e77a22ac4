"""Metadata of fields: inheritance, groups, and selections by reader."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from rljob.api.base import Model
from rljob.api.explain import explain_field
from rljob.api.field_metadata import FieldMeta, field_at, manifest_fields, outermost, select
from rljob.api.immutable import run_changes

Shape = Annotated[dict[str, str], FieldMeta(reader="pods", local_part="a part")]


class Inner(Model):
    """Fields below others."""

    plain: int = 1
    shaped: Shape | None = None
    without_pods: Annotated[int, FieldMeta(reader="objects", local="no pods")] = 1


class Entry(Model):
    """An entry of a list."""

    name: str
    code: Annotated[Literal["here", "later"], FieldMeta(unsupported=("later",))] = "here"


class Whole(Model):
    """A model with every kind of field."""

    inner: Inner = Inner()
    decided: Annotated[Inner, FieldMeta(reader="operator", local="no operator")] = Inner()
    fixed: Annotated[Inner | None, FieldMeta(reader="objects", mutable="never", unsupported=True)] = None
    needed: Inner
    count: Annotated[int, FieldMeta(reader="coordinator", mutable="raise")] = 1
    entries: list[Entry] = Field(default=[])


FIELDS = manifest_fields(Whole)


@pytest.mark.parametrize(
    ("path", "reader", "mutable", "local"),
    [
        ("inner", "components", "partly", ""),
        ("inner.plain", "components", "never", ""),
        ("inner.shaped", "pods", "always", ""),
        ("inner.withoutPods", "objects", "always", "no pods"),
        ("decided", "operator", "always", "no operator"),
        ("decided.plain", "operator", "always", "no operator"),
        ("decided.withoutPods", "objects", "always", "no operator"),  # the outer reason holds for all fields below
        ("fixed.plain", "objects", "never", ""),
        ("fixed.shaped", "pods", "always", ""),  # the inherited mutability belongs to the inherited reader
        ("count", "coordinator", "raise", ""),
        ("entries", "components", "never", ""),
        ("entries[].name", "components", "never", ""),
    ],
)
def test_a_field_has_its_own_metadata_or_that_of_the_field_above(path, reader, mutable, local):
    field = FIELDS[path]
    assert (field.reader, field.mutable, field.local) == (reader, mutable, local)


def test_values_of_planned_features_are_unsupported():
    found = {field.path: field.unsupported for field in outermost(FIELDS, lambda field: field.unsupported)}
    assert found == {"fixed": True, "entries[].code": ("later",)}


def test_the_outermost_fields_are_those_whose_values_are_compared_with_a_default():
    local = [field.path for field in outermost(FIELDS, lambda field: field.local)]
    decided = ["decided.plain", "decided.shaped", "decided.withoutPods"]
    assert local == ["inner.withoutPods", *decided, "fixed.withoutPods", "needed.withoutPods"]


def test_a_selection_keeps_what_the_readers_read_and_no_mapping_without_it():
    value = {
        "inner": {"shaped": {"a": "b"}},
        "decided": {"plain": 2},
        "needed": {"withoutPods": 3},
        "count": 4,
        "entries": [{"name": "a", "code": "here"}],
    }
    entries = [{"name": "a", "code": "here"}]
    assert select(value, FIELDS, ["components"]) == {"needed": {}, "entries": entries}
    assert select(value, FIELDS, ["components", "coordinator"]) == {"needed": {}, "count": 4, "entries": entries}
    assert select(value, FIELDS, ["pods"]) == {"inner": {"shaped": {"a": "b"}}}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("entries[3].name", "entries[].name"),
        ("entries", "entries"),
        ("inner.shaped.a.b/c[0]", "inner.shaped"),
        ("inner.plain", "inner.plain"),
    ],
)
def test_a_path_of_a_message_belongs_to_one_field(path, field):
    assert field_at(FIELDS, path).path == field


def test_a_run_continues_if_no_field_that_defines_it_differs():
    def manifest(steps=3, seed=1, **spec):
        return {"spec": {"seed": seed, "training": {"steps": steps}, **spec}}

    assert not list(run_changes(manifest(), manifest(4, suspend=True, storage={"size": "1Gi"})))
    found = [(path, cause) for path, _, _, cause in run_changes(manifest(), manifest(2, 7))]
    assert found == [
        ("spec.seed", "started with 1, not 7"),
        ("spec.training.steps", "started with 3, which can only be raised; 2 is lower"),
    ]


@pytest.mark.parametrize(
    ("path", "change", "local"),
    [
        ("spec.seed", "no", ""),
        ("spec.training.steps", "can only be raised", ""),
        ("spec.rollouts", "partly", ""),
        ("spec.storage.size", "no", "no effect: the run directory is the storage"),
        ("spec.trainer.template", "yes", "only `env` with a value, `command` and `args` of the container `main`"),
    ],
)
def test_the_description_of_a_field_states_its_mutability_and_its_effect_on_one_machine(path, change, local):
    text = explain_field(path)
    assert f"\nMay change after creation: {change}.\n" in text
    assert (f"\nOn one machine: {local}.\n" in text) if local else "On one machine" not in text
