import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.text_escape import escape_block
from rljob.api.yaml_loader import YamlError, read_yaml, write_yaml

ACCEPTED = [
    ("3e-4", 3e-4),
    ("1e3", 1000),
    ("1.0", 1),
    ("1.5", 1.5),
    (".5", 0.5),
    ("+.5", 0.5),
    ("5.", 5),
    ("-7", -7),
    ("+7", 7),
    ("0", 0),
    ("1e21", 1e21),
    ("9223372036854775807", 2**63 - 1),
    ("18446744073709551616", 2**64),
    ("1180591620717411303424", 2.0**70),
    ("true", True),
    ("FALSE", False),
    ("~", None),
    ("null", None),
    ("", None),
    ("tRUE", "tRUE"),
    ("yEs", "yEs"),
    ("1.2.3", "1.2.3"),
    ("0.5.1", "0.5.1"),
    ("e3", "e3"),
    ("0b9c", "0b9c"),
    ("0x", "0x"),
    ("10Gi", "10Gi"),
    ("job://model", "job://model"),
    ("a:80", "a:80"),
    ("1:80", "1:80"),
]
_REFUSED = """
y Y n N yes Yes YES no No NO on On ON off Off OFF
017 08 00 -012 00.5 01e3 0o17 0O17 0x1F 0X1f -0x1F 0b11 0B11 1_000 0_7 1_ .5_0 1_0.5e3 1e1_0
1:30 12:30:00 1:30.5 2026-01-02 2026-1-2T00:00:00Z .inf -.INF .NaN 1e400 << =
9223372036854775809 -99999999999999999999 123456789012345678901234567890
"""
REFUSED = _REFUSED.split()


@pytest.mark.parametrize(("text", "value"), ACCEPTED)
def test_a_plain_scalar_has_the_same_value_as_in_kubectl(text, value):
    read = read_yaml(f"x: {text}\n")["x"]
    assert read == value
    assert isinstance(read, type(value))


@pytest.mark.parametrize("text", [*REFUSED, "2026-01-02 10:20:30"])
def test_a_plain_scalar_that_other_readers_read_differently_is_refused(text):
    with pytest.raises(YamlError, match=r"^line 2, column 4: .*; put it in quotes") as caught:
        read_yaml(f"a: 1\nx: {text}\n")
    assert repr(text) in str(caught.value)
    with pytest.raises(YamlError, match=r"line 1, column 2: .*; put it in quotes"):
        read_yaml(f"{{{text}: 1}}\n")
    assert read_yaml(f'x: "{text}"\n') == read_yaml(f"x: |-\n  {text}\n") == {"x": text}
    assert read_yaml(write_yaml({text: text})) == {text: text}


@pytest.mark.parametrize(
    "text", ["a\x1b[2J", "a\u202eb", "\u200b", "a\u2028b", "x\x9by\n\tz", "\U000e0041", "\x7f\r\n"]
)
def test_control_and_invisible_characters_are_written_as_escapes_and_read_as_the_same_text(text):
    written = write_yaml({text: [text]})
    assert written == escape_block(written)
    assert read_yaml(written) == {text: [text]}


def test_a_file_mode_is_refused_with_its_decimal_number():
    with pytest.raises(
        YamlError, match="'0644' is octal to kubectl; put it in quotes, or write the decimal number 420"
    ):
        read_yaml("defaultMode: 0644")


def test_a_quoted_scalar_is_text():
    assert read_yaml("a: '5'\nb: \"on\"\nc: !!str 7") == {"a": "5", "b": "on", "c": "7"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' is used twice"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: a second document begins"),
        ("a: [1, 2\n", "line 2, column 1: while parsing a flow sequence"),
        ("a:\n\t- 1\n", "line 2, column 1"),
        ("a: !!binary aGk=\n", "the tag 'tag:yaml.org,2002:binary' has no meaning"),
        ("a: !python/name:os.system x\n", "has no meaning"),
        ("a: !!int 5\n", "the tag 'tag:yaml.org,2002:int' has no meaning"),
        ("a: !!map 5\n", "expected a mapping"),
        ("1: x\n", "the key '1' is not text"),
        ("[a]: x\n", "the key a list or mapping is not text"),
        ("a: \x00\n", "not YAML: unacceptable character"),
        (f"a: {'9' * 5000}\n", "is too large for a number"),
        ("[" * 5000, "nested too deeply"),
        ("a" * (1 << 20) + "b", "longer than 1,048,576 bytes"),
    ],
)
def test_yaml_that_is_not_a_manifest_is_refused_in_one_sentence(text, message):
    with pytest.raises(YamlError) as caught:
        read_yaml(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_each_alias_has_its_own_copy_of_the_value():
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


def test_an_anchor_that_contains_itself_is_refused():
    with pytest.raises(YamlError, match=r"^line 1, column 4: an anchor contains an alias of itself"):
        read_yaml("a: &x [1, *x]")


def json_equal(value):
    """Return the value after kubectl's conversion to JSON."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    if isinstance(value, dict):
        return {key: json_equal(inner) for key, inner in value.items()}
    return [json_equal(inner) for inner in value] if isinstance(value, list) else value


texts = st.sampled_from(REFUSED) | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_written_values_are_read_as_the_same_values(value):
    assert read_yaml(write_yaml(value)) == json_equal(value)
