import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.yaml_loader import BareWord, YamlError, read_yaml, scalar, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # What goyaml.v2's resolve.go, and JSON after it, make of each.
        ("3e-4", 3e-4),
        ("1e3", 1000),
        ("1.0", 1),
        ("1.5", 1.5),
        (".5", 0.5),
        ("+.5", 0.5),
        ("5.", 5),
        ("0x10", 16),
        ("0b11", 3),
        ("-0b11", -3),
        ("017", 15),
        ("0o17", 15),
        ("08", 8),
        ("1_000", 1000),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        ("1e21", 1e21),
        ("9223372036854775807", 2**63 - 1),
        ("18446744073709551615", 2**64),
        ("99999999999999999999", 10**20),
        ("123456789012345678901234567890", 1.2345678901234568e29),
        ("-9223372036854775809", -(2**63)),
        ("0xffffffffffffffff", 2**64),
        ("0x1ffffffffffffffff", "0x1ffffffffffffffff"),
        ("02000000000000000000000", 2e21),
        ("1e400", "1e400"),
        (".5_0", 0.5),
        (".5_", ".5_"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("tRUE", "tRUE"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("1.2.3", "1.2.3"),
        ("e3", "e3"),
        ("-", "-"),
        ("0x", "0x"),
        ("on", "on"),
        ("Yes", "Yes"),
    ],
)
def test_a_plain_scalar_has_the_value_that_kubectl_gives_it(text, value):
    read = scalar(text)
    assert read == value
    assert isinstance(read, type(value))


def test_whole_floats_become_whole_numbers_as_in_json():
    assert isinstance(scalar("2.0"), int)
    assert isinstance(scalar("1e21"), float)


def test_quotes_make_text_of_anything():
    assert read_yaml("a: '5'\nb: \"on\"\nc: !!str 7") == {"a": "5", "b": "on", "c": "7"}
    assert isinstance(read_yaml("on"), BareWord)
    assert not isinstance(read_yaml("'on'"), BareWord)


def test_anchors_and_merge_keys_work():
    data = read_yaml("base: &b {x: 1, y2: 2}\nother: {<<: *b, x: 3}\n")
    assert data["other"] == {"x": 3, "y2": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' is there twice"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: a second document begins"),
        ("a: [1, 2\n", "line 2, column 1: while parsing a flow sequence"),
        ("a:\n\t- 1\n", "line 2, column 1"),
        ("a: .inf\n", "infinite or not a number"),
        ("a: !!binary aGk=\n", "the tag 'tag:yaml.org,2002:binary' has no meaning"),
        ("a: !python/name:os.system x\n", "has no meaning"),
        ("a: !!int abc\n", "the tag 'tag:yaml.org,2002:int' has no meaning"),
        ("1: x\n", "the key '1' is not text"),
        ("on: x\n", "the key 'on' is not text"),
        ("[a]: x\n", "the key a list or mapping is not text"),
        ("a: \x00\n", "not YAML: unacceptable character"),
        ("[" * 5000, "nested too deeply"),
        ("a" * (1 << 20) + "b", "longer than 1,048,576 bytes"),
    ],
)
def test_what_is_no_manifest_yaml_is_refused_in_a_sentence(text, says):
    with pytest.raises(YamlError) as caught:
        read_yaml(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_an_alias_repeats_can_be_changed_by_itself():
    data = read_yaml("a: &a {b: [1]}\nc: *a\n")
    data["c"]["b"].append(2)
    assert data == {"a": {"b": [1]}, "c": {"b": [1, 2]}}


def test_a_long_chain_of_aliases_is_refused():
    text = "a0: &a0 []\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1200))
    with pytest.raises(YamlError, match=r"nested too deeply|aliases"):
        read_yaml(text)


def test_aliases_cannot_make_a_small_text_large():
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(YamlError, match="aliases"):
        read_yaml("\n".join(lines))


def json_equal(value):
    """The value after kubectl's way through JSON."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    if isinstance(value, dict):
        return {key: json_equal(inner) for key, inner in value.items()}
    return [json_equal(inner) for inner in value] if isinstance(value, list) else value


words = st.sampled_from(["on", "y", "NO", "1e3", "3e-4", "0x1F", "017", "null", "~", "<<", "2026-01-02", "1_0", "#"])
texts = words | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_what_is_written_is_read_as_the_same(value):
    assert read_yaml(write_yaml(value)) == json_equal(value)


def test_infinity_is_known_to_the_scalar_reader():
    assert scalar("-.inf") == -math.inf


def test_an_anchor_that_contains_itself_is_refused_in_plain_words():
    with pytest.raises(YamlError, match=r"^line 1, column 4: an anchor contains an alias of itself"):
        read_yaml("a: &x [1, *x]")
