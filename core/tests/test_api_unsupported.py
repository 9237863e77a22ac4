"""Fields of planned features may exist before the feature. Their unsupported values are refused by name."""

import pytest

from rljob.api.errors import ManifestError
from rljob.api.explain import fields
from rljob.api.field_metadata import manifest_fields, outermost
from rljob.api.load import validate
from rljob.api.models import RLJobSpec

EXAMPLES = {
    "models[].placement": ("trainer", "spec.models[0].placement: trainer is not supported yet; remove it"),
    "rollouts[].placement": (
        "Colocated",
        "spec.rollouts[0].placement: Colocated is not supported yet; remove it or set Separate",
    ),
    "weightSync.groups": ("shared", "spec.weightSync.groups: shared is not supported yet; remove it or set perEngine"),
}

UNSUPPORTED = list(outermost(manifest_fields(RLJobSpec), lambda field: field.unsupported))


def with_value(manifest, path, value):
    here = manifest["spec"]
    *way, last = path.split(".")
    for step in way:
        here = here[step[:-2]][0] if step.endswith("[]") else here.setdefault(step, {})
    here[last] = value
    return manifest


def refusal(manifest):
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    (found,) = caught.value.problems
    return found


def test_every_field_with_unsupported_values_has_an_example():
    assert EXAMPLES.keys() == {field.path for field in UNSUPPORTED}


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_unsupported_value_is_refused_by_name(manifest, path):
    value, sentence = EXAMPLES[path]
    assert refusal(with_value(manifest, path, value)).startswith(sentence)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("environments", []),
        ("trainer.backend", "fsdp"),
        ("rollouts[].placement", "Separate"),
    ],
)
def test_the_default_may_be_written_out(manifest, path, value):
    validate(with_value(manifest, path, value))


def test_an_unsupported_value_is_recognized_in_any_case(manifest):
    assert refusal(with_value(manifest, "rollouts[].placement", "colocated")) == (
        "spec.rollouts[0].placement: colocated is not supported yet; remove it or set Separate"
    )
    assert refusal(with_value(manifest, "rollouts[].placement", "separate")) == (
        "spec.rollouts[0].placement: must be 'Separate' or 'Colocated', not 'separate'"
    )
    assert refusal(with_value(manifest, "rollouts[].placement", "vllm")).startswith("spec.rollouts[0].placement: must")


def test_the_page_on_fields_names_unsupported_values():
    known = fields()
    for field in UNSUPPORTED:
        assert "not supported yet" in known[f"spec.{field.name}"].meaning.lower()
    assert known["spec.weightSync.groups"].meaning.endswith("`shared` is not supported yet.")
    assert "not supported" not in known["spec.trainer.dtype"].meaning
