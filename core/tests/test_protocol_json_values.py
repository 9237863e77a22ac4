"""The bound of the values of a JSON text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.json_values import has_more_marks

JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a,[{"\\\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('k,"\\')), inner),
    max_leaves=20,
)


def marks(value):
    """Return the number of strings, opening brackets and commas of a value."""
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(marks, value))
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + len(value) + sum(map(marks, value.values()))
    return int(isinstance(value, str))


@given(JSON)
def test_marks_of_any_text_are_counted(value):
    text, count = json.dumps(value).encode(), marks(value)
    assert not has_more_marks(text, count)
    assert count == 0 or has_more_marks(text, count - 1)


@pytest.mark.parametrize("text", [b'"', b'"' * 1000, b'"' + b"\\\\" * 1000, b"[" * 1000, b'["' + b"," * 1000])
def test_a_text_that_is_no_json_has_a_result(text):
    assert has_more_marks(text, 100) in (False, True)


def test_characters_of_strings_are_not_counted():
    assert not has_more_marks(b'{"a":"' + b'[{,\\"' * 1000 + b'"}', 3)


@pytest.mark.parametrize("part", [b"[],", b'{"a":1},', b'"a",', b"1,"])
def test_many_values_are_found(part):
    assert has_more_marks(b"[" + part * 1000 + b"0]", 1000)
    assert not has_more_marks(b"[" + part * 1000 + b"0]", 5000)
